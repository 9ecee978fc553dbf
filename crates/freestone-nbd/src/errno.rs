//! NBD error numbers, and the mapping of device errors to them.

use std::borrow::Cow;
use std::fmt;

use freestone_core::device::{Error, Failed, Request};
use freestone_nbd_proto::errno as number;

/// The error numbers that the protocol defines.
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

/// Groups of commands with the same error mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read, cache, block status: out of range is EINVAL.
    Plain,
    /// Trim, as `Plain`.
    Trim,
    /// Flush, as `Plain`.
    Flush,
    /// Write and write zeroes: out of range is ENOSPC.
    Store,
    /// Write zeroes with `CMD_FLAG_FAST_ZERO`: as `Store`, but may also return ENOTSUP.
    StoreFast,
}

impl Action {
    /// Returns the kind of failure to count and log.
    const fn failed(self) -> Failed {
        match self {
            Self::Plain => Failed::Read,
            Self::Trim => Failed::Trim,
            Self::Flush => Failed::Flush,
            Self::Store | Self::StoreFast => Failed::Write,
        }
    }
}

/// Why a request failed: an error number, and a message that structured replies carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub errno: Errno,
    pub text: Cow<'static, str>,
    /// The device's error, if the device reported it.
    pub cause: Option<Cause>,
}

/// An error of a device, and the request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    pub failed: Failed,
    pub error: Error,
    /// Offset in bytes, of the failed part if the request was split.
    pub offset: u64,
    pub len: u64,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { failed, error, offset, len } = self;
        write!(f, "a {failed} failed: {error}")?;
        match failed {
            Failed::Flush => Ok(()),
            _ => write!(f, "; offset {offset}, length {len}"),
        }
    }
}

impl Failure {
    /// Creates a failure that the server detected itself.
    pub const fn new(errno: Errno, text: &'static str) -> Self {
        Self { errno, text: Cow::Borrowed(text), cause: None }
    }

    /// Creates a failure from a device's error.
    #[cold]
    pub fn of(error: Error, action: Action, request: &Request) -> Self {
        let text = Cow::Owned(error.to_string());
        let Request { offset, len, .. } = *request;
        let cause = Cause { failed: action.failed(), error, offset, len };
        Self { errno: errno(error, action), text, cause: Some(cause) }
    }
}

/// Maps a device error to an error number. The protocol reserves ENOTSUP for fast zeroes and EOVERFLOW for
/// lengths, and has no numbers for zones.
pub const fn errno(error: Error, action: Action) -> Errno {
    match error {
        Error::OutOfRange => match action {
            Action::Plain | Action::Trim | Action::Flush => Errno::Inval,
            Action::Store | Action::StoreFast => Errno::NoSpc,
        },
        Error::Misaligned => Errno::Inval,
        Error::ReadOnly => Errno::Perm,
        Error::NoSpace => Errno::NoSpc,
        Error::NoMemory => Errno::NoMem,
        Error::Gone => Errno::Shutdown,
        Error::Unsupported => match action {
            Action::StoreFast => Errno::NotSup,
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
        assert_eq!(errno(Error::OutOfRange, Action::Plain), Errno::Inval);
        assert_eq!(errno(Error::OutOfRange, Action::Store), Errno::NoSpc);
    }

    #[test]
    fn errno_notsup_only_for_fast_zeroes() {
        for error in Error::ALL {
            for action in [Action::Plain, Action::Trim, Action::Flush, Action::Store] {
                assert_ne!(errno(error, action), Errno::NotSup, "{error}");
                assert_ne!(errno(error, action), Errno::Overflow, "{error}");
            }
        }
        assert_eq!(errno(Error::Unsupported, Action::StoreFast), Errno::NotSup);
    }

    #[test]
    fn failure_text_is_device_error() {
        let request = Request::new(Op::Write, 8192, 512);
        assert_eq!(Failure::of(Error::NoSpace, Action::Store, &request).text, Error::NoSpace.to_string());
    }

    #[test]
    fn cause_display_has_kind_error_and_range() {
        let cause = |op, action| {
            Failure::of(Error::Media, action, &Request::new(op, 8192, 512)).cause.unwrap().to_string()
        };
        assert_eq!(cause(Op::Read, Action::Plain), "a read failed: I/O error; offset 8192, length 512");
        assert_eq!(cause(Op::Discard, Action::Trim), "a trim failed: I/O error; offset 8192, length 512");
        assert_eq!(cause(Op::Flush, Action::Flush), "a flush failed: I/O error");
    }
}
