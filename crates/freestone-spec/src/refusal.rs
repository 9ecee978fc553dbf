//! Errors of operations on devices: an errno for programs and a sentence for people.

use std::fmt::Display;
use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;

macro_rules! errnos {
    ($($name:ident = $meaning:literal;)*) => {
        /// Names of the errors that a command on the control socket returns in `data.errno`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Errno {
            $(#[doc = $meaning] $name,)*
        }

        impl Errno {
            /// All error names.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the meaning of the error as a sentence.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }
        }
    };
}

errnos! {
    EINVAL = "A value is invalid.";
    ENODEV = "The device, job, tag or store does not exist, or the device has no backing device.";
    EEXIST = "The name is taken, or the file exists and is not replaced.";
    EBUSY = "The device, file or disk is in use by clients, other devices or another verb; or a value is fixed for the life of the device; or another push set the tag.";
    EOPNOTSUPP = "This kind of device does not support the operation.";
    EROFS = "The device is read-only.";
    EPERM = "The operation is not allowed at the read-only control socket.";
    EIO = "The device could not be set up; a read or write of its backing device failed; `writeback_limit` is used up.";
    EADDRNOTAVAIL = "The address cannot be bound.";
    ENOSPC = "A limit of the server is reached, a disk or the backing device is full, or `mem_limit` leaves no room.";
    ETIMEDOUT = "Requests in flight, an operation or a store did not finish in time.";
    ERANGE = "The page is beyond the end of the device.";
    ENOMEM = "Memory or a thread cannot be allocated.";
    ETOOMANYREFS = "The limit of open zones is reached.";
    EOVERFLOW = "The limit of active zones is reached.";
    ECANCELED = "The job was cancelled: by a verb, because its client disconnected, or because the server shuts down.";
    ECONNREFUSED = "No server answers. The client program reports this, not a server.";
}

impl Errno {
    /// Returns the errno for a failed operation on a file: `ENOSPC` if the disk is full, or a quota
    /// or `RLIMIT_FSIZE` is reached, else `EIO`.
    pub fn of_file(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::ENOSPC
            }
            _ => Self::EIO,
        }
    }
}

/// Error of an operation on a device: one sentence that names the device and the key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{sentence}")]
pub struct Refusal {
    /// Error name for programs.
    pub errno: Errno,
    /// Message for people: one sentence.
    pub sentence: String,
    /// True if the request itself is invalid. False if the state of the machine or of devices
    /// prevents it.
    pub usage: bool,
}

impl Refusal {
    /// Creates the error of a valid request that failed.
    pub fn failed(errno: Errno, why: impl Display) -> Self {
        Self { errno, sentence: why.to_string(), usage: false }
    }

    /// Creates the error of an invalid request.
    pub fn invalid(why: impl Display) -> Self {
        Self { errno: Errno::EINVAL, sentence: why.to_string(), usage: true }
    }

    /// Inserts the name of the device before the sentence.
    #[must_use]
    pub fn of(self, name: &str) -> Self {
        Self { sentence: format!("{name}: {}", self.sentence), ..self }
    }
}

/// Creates a [`Refusal`] from a message with format arguments: that of a valid request which failed with an errno,
/// `refusal!(EBUSY, "{name}: in use")`, or that of an `invalid` request.
#[macro_export]
macro_rules! refusal {
    (invalid, $($message:tt)+) => { $crate::refusal::Refusal::invalid(format_args!($($message)+)) };
    ($errno:ident, $($message:tt)+) => {
        $crate::refusal::Refusal::failed($crate::refusal::Errno::$errno, format_args!($($message)+))
    };
}

/// Returns the error of [`refusal!`] from the function or closure.
#[macro_export]
macro_rules! refuse {
    ($($refusal:tt)+) => { return Err($crate::refusal!($($refusal)+).into()) };
}

/// Escapes the control characters of a message, since quoted user input must not add lines or
/// control a terminal.
pub fn one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            escaped.extend(c.escape_debug());
        } else {
            escaped.push(c);
        }
    }
    escaped
}
