//! NBD error numbers, and the mapping of device errors to them.

use std::borrow::Cow;
use std::fmt;

use freestone_core::device::{Error, FailureKind, Request};
use freestone_nbd_proto::errno as number;

/// Error numbers that the NBD protocol defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    Perm = number::PERM,
    Io = number::IO,
    NoMem = number::NOMEM,
    Inval = number::INVAL,
    NoSpc = number::NOSPC,
    Overflow = number::OVERFLOW,
    NotSup = number::NOTSUP,
    Shutdown = number::SHUTDOWN,
}

/// Groups of commands with the same error mapping and the same failure counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandGroup {
    /// Read, cache and block status. Out of range maps to EINVAL.
    Plain,
    /// Trim. Errors map as for `Plain`.
    Trim,
    /// Flush. Errors map as for `Plain`.
    Flush,
    /// Write and write zeroes. Out of range maps to ENOSPC.
    Store,
    /// Write zeroes with `CMD_FLAG_FAST_ZERO`. Errors map as for `Store`, but unsupported maps to ENOTSUP.
    StoreFast,
}

impl CommandGroup {
    /// Returns the kind under which failures of the group are counted and logged.
    const fn failed(self) -> FailureKind {
        match self {
            Self::Plain => FailureKind::Read,
            Self::Trim => FailureKind::Trim,
            Self::Flush => FailureKind::Flush,
            Self::Store | Self::StoreFast => FailureKind::Write,
        }
    }
}

/// A failed request: the error number, and a message for structured replies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub errno: Errno,
    pub message: Cow<'static, str>,
    /// The device's error; `None` if the server detected the failure itself.
    pub cause: Option<Cause>,
}

/// An error of a device, and the request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    pub failed: FailureKind,
    pub error: Error,
    /// Offset in bytes of the failed request, or of the failed part if the request was split.
    pub offset: u64,
    pub len: u64,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { failed, error, offset, len } = self;
        write!(f, "a {failed} failed: {error}")?;
        match failed {
            FailureKind::Flush => Ok(()),
            _ => write!(f, "; offset {offset}, length {len}"),
        }
    }
}

impl Failure {
    /// Creates a failure that the server detected itself.
    pub const fn new(errno: Errno, text: &'static str) -> Self {
        Self { errno, message: Cow::Borrowed(text), cause: None }
    }

    /// Creates a failure from a device's error.
    #[cold]
    pub fn of(error: Error, group: CommandGroup, request: &Request) -> Self {
        let text = Cow::Owned(error.to_string());
        let Request { offset, len, .. } = *request;
        let cause = Cause { failed: group.failed(), error, offset, len };
        Self { errno: errno(error, group), message: text, cause: Some(cause) }
    }
}

/// Maps a device error to an NBD error number. The protocol reserves ENOTSUP for fast zeroes and EOVERFLOW
/// for lengths. Zone errors map to EIO, because the protocol has no numbers for them.
pub const fn errno(error: Error, group: CommandGroup) -> Errno {
    match error {
        Error::OutOfRange => match group {
            CommandGroup::Plain | CommandGroup::Trim | CommandGroup::Flush => Errno::Inval,
            CommandGroup::Store | CommandGroup::StoreFast => Errno::NoSpc,
        },
        Error::Misaligned => Errno::Inval,
        Error::ReadOnly => Errno::Perm,
        Error::NoSpace => Errno::NoSpc,
        Error::NoMemory => Errno::NoMem,
        Error::Gone => Errno::Shutdown,
        Error::Unsupported => match group {
            CommandGroup::StoreFast => Errno::NotSup,
            _ => Errno::Inval,
        },
        Error::Media
        | Error::ZoneWritePointer
        | Error::ZoneCondition
        | Error::ZoneBoundary
        | Error::ZoneTooManyOpen
        | Error::ZoneTooManyActive => Errno::Io,
    }
}

#[cfg(test)]
mod tests {
    use freestone_core::device::Op;

    use super::*;

    #[test]
    fn errno_out_of_range_depends_on_command() {
        assert_eq!(errno(Error::OutOfRange, CommandGroup::Plain), Errno::Inval);
        assert_eq!(errno(Error::OutOfRange, CommandGroup::Store), Errno::NoSpc);
    }

    #[test]
    fn errno_notsup_only_for_fast_zeroes() {
        for error in Error::ALL {
            for group in [CommandGroup::Plain, CommandGroup::Trim, CommandGroup::Flush, CommandGroup::Store] {
                assert_ne!(errno(error, group), Errno::NotSup, "{error}");
                assert_ne!(errno(error, group), Errno::Overflow, "{error}");
            }
        }
        assert_eq!(errno(Error::Unsupported, CommandGroup::StoreFast), Errno::NotSup);
    }

    #[test]
    fn failure_text_is_device_error() {
        let request = Request::new(Op::Write, 8192, 512);
        assert_eq!(
            Failure::of(Error::NoSpace, CommandGroup::Store, &request).message,
            Error::NoSpace.to_string()
        );
    }

    #[test]
    fn cause_display_has_kind_error_and_range() {
        let cause = |op, group| {
            Failure::of(Error::Media, group, &Request::new(op, 8192, 512)).cause.unwrap().to_string()
        };
        assert_eq!(cause(Op::Read, CommandGroup::Plain), "a read failed: I/O error; offset 8192, length 512");
        assert_eq!(
            cause(Op::Discard, CommandGroup::Trim),
            "a trim failed: I/O error; offset 8192, length 512"
        );
        assert_eq!(cause(Op::Flush, CommandGroup::Flush), "a flush failed: I/O error");
    }
}
