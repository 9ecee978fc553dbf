//! Errors as the protocol knows them.

use std::borrow::Cow;
use std::fmt;

use freestone_core::device::{Error, Failed, Request};
use freestone_nbd_proto::errno as number;

/// The closed set of error numbers of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Operation not permitted.
    Perm = number::PERM,
    /// Input/output error.
    Io = number::IO,
    /// Cannot allocate memory.
    NoMem = number::NOMEM,
    /// Invalid argument.
    Inval = number::INVAL,
    /// No space left on device.
    NoSpc = number::NOSPC,
    /// Value too large.
    Overflow = number::OVERFLOW,
    /// Operation not supported.
    NotSup = number::NOTSUP,
    /// The server is going away.
    Shutdown = number::SHUTDOWN,
}

/// What a command does, as far as its errors go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read, cache, block status: outside the device is EINVAL.
    Plain,
    /// Trim, as `Plain`.
    Trim,
    /// Flush, as `Plain`.
    Flush,
    /// Write and write zeroes: outside the device is ENOSPC.
    Store,
    /// Write zeroes with `CMD_FLAG_FAST_ZERO`: as `Store`, and the only one that may answer
    /// ENOTSUP.
    StoreFast,
}

impl Action {
    /// What failed, for who looks after the device.
    const fn failed(self) -> Failed {
        match self {
            Self::Plain => Failed::Read,
            Self::Trim => Failed::Trim,
            Self::Flush => Failed::Flush,
            Self::Store | Self::StoreFast => Failed::Write,
        }
    }
}

/// Why a request failed: a number, and a text for people that structured replies carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The number.
    pub errno: Errno,
    /// The text.
    pub text: Cow<'static, str>,
    /// What the device answered, where it was asked.
    pub cause: Option<Cause>,
}

/// What a device answered, and to what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// What failed.
    pub failed: Failed,
    /// Why.
    pub error: Error,
    /// First byte, of the part that failed where it was handed on in parts.
    pub offset: u64,
    /// Length in bytes.
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
    /// A failure that the server found itself.
    pub const fn new(errno: Errno, text: &'static str) -> Self {
        Self { errno, text: Cow::Borrowed(text), cause: None }
    }

    /// What a device answered to this request.
    #[cold]
    pub fn of(error: Error, action: Action, request: &Request) -> Self {
        let text = Cow::Owned(error.to_string());
        let Request { offset, len, .. } = *request;
        let cause = Cause { failed: action.failed(), error, offset, len };
        Self { errno: errno(error, action), text, cause: Some(cause) }
    }
}

/// Maps every error of a device. The protocol reserves ENOTSUP for fast zeroes and EOVERFLOW for
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
    fn out_of_range_depends_on_the_command() {
        assert_eq!(errno(Error::OutOfRange, Action::Plain), Errno::Inval);
        assert_eq!(errno(Error::OutOfRange, Action::Store), Errno::NoSpc);
    }

    #[test]
    fn not_supported_is_for_fast_zeroes_only() {
        for error in Error::ALL {
            for action in [Action::Plain, Action::Trim, Action::Flush, Action::Store] {
                assert_ne!(errno(error, action), Errno::NotSup, "{error}");
                assert_ne!(errno(error, action), Errno::Overflow, "{error}");
            }
        }
        assert_eq!(errno(Error::Unsupported, Action::StoreFast), Errno::NotSup);
    }

    #[test]
    fn text_is_the_devices() {
        let request = Request::new(Op::Write, 8192, 512);
        assert_eq!(Failure::of(Error::NoSpace, Action::Store, &request).text, Error::NoSpace.to_string());
    }

    #[test]
    fn a_cause_says_what_failed_and_where() {
        let cause = |op, action| {
            Failure::of(Error::Media, action, &Request::new(op, 8192, 512)).cause.unwrap().to_string()
        };
        assert_eq!(cause(Op::Read, Action::Plain), "a read failed: I/O error; offset 8192, length 512");
        assert_eq!(cause(Op::Discard, Action::Trim), "a trim failed: I/O error; offset 8192, length 512");
        assert_eq!(cause(Op::Flush, Action::Flush), "a flush failed: I/O error");
    }
}
