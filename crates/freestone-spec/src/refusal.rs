//! Why something is not done with a device.

use std::fmt::Display;
use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Names of the errors a verb answers with, in `data.errno`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Errno {
    /// A value that cannot be.
    EINVAL,
    /// No such device, or no backing device.
    ENODEV,
    /// The name is taken.
    EEXIST,
    /// In use, or fixed for the life of the device.
    EBUSY,
    /// This kind of device does not do that.
    EOPNOTSUPP,
    /// The device does not change.
    EROFS,
    /// Not at the control socket that changes nothing.
    EPERM,
    /// The device could not be set up; a read or write of its backing device failed;
    /// `writeback_limit` is used up.
    EIO,
    /// Nothing can listen at that address.
    EADDRNOTAVAIL,
    /// A limit of the server is reached, or no room on a disk.
    ENOSPC,
    /// What the device has under way does not end.
    ETIMEDOUT,
    /// A page that the device does not have.
    ERANGE,
    /// No memory.
    ENOMEM,
    /// Too many open zones.
    ETOOMANYREFS,
    /// Too many active zones.
    EOVERFLOW,
    /// It was cancelled: by name, or because the client went away or the server ends.
    ECANCELED,
    /// No server answers: said by the program, not by a server.
    ECONNREFUSED,
}

impl Errno {
    /// The errno of a call on a file that failed: ENOSPC if the disk, a quota or `RLIMIT_FSIZE` leaves no room,
    /// else EIO.
    pub fn of_file(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::ENOSPC
            }
            _ => Self::EIO,
        }
    }
}

/// Why something is not done: one sentence that names device and key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{sentence}")]
pub struct Refusal {
    /// For programs.
    pub errno: Errno,
    /// For people.
    pub sentence: String,
    /// What was asked for cannot be meant; else it is about the machine, or the state of devices.
    pub usage: bool,
}

impl Refusal {
    /// It did not work out.
    pub fn failed(errno: Errno, why: impl Display) -> Self {
        Self { errno, sentence: why.to_string(), usage: false }
    }

    /// The values cannot be meant.
    pub fn invalid(why: impl Display) -> Self {
        Self { errno: Errno::EINVAL, sentence: why.to_string(), usage: true }
    }

    /// Names the device.
    #[must_use]
    pub fn of(self, name: &str) -> Self {
        Self { sentence: format!("{name}: {}", self.sentence), ..self }
    }
}

/// What somebody typed may be in a sentence: whatever that was, it stays one line, and does nothing
/// to a terminal.
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
