//! Errors from opening an RBD image, and the meaning of Ceph's error numbers.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone_core::device::Error;
use thiserror::Error as ThisError;

/// A positive system error number (`errno`).
pub type Errno = i32;

/// Errors from opening an RBD image as a device. The messages name the remedy if it is known.
#[derive(Debug, ThisError)]
pub enum SetupError {
    /// librbd or librados cannot be loaded.
    #[error("{library} cannot be loaded; Debian's package librbd1 has it ({why})")]
    NoLibrary {
        /// File name or path of the library.
        library: String,
        /// Error message of the dynamic loader.
        why: String,
    },
    /// librbd or librados lacks a function, so its version is too old.
    #[error("{library} has no {function}; version 16 (Pacific) of Ceph or a later one is needed")]
    OldLibrary {
        /// File name or path of the library.
        library: String,
        /// Name of the missing function.
        function: &'static str,
    },
    /// The Ceph configuration is missing or invalid.
    #[error("conf{}: {}", path_suffix(.path.as_deref()), conf_reason(*.errno, .path.is_some()))]
    Conf {
        /// Path of the configuration file; `None` for Ceph's default search path.
        path: Option<PathBuf>,
        /// Error number from reading the file.
        errno: Errno,
    },
    /// Ceph rejects the value of an option.
    #[error("{what} cannot be used: {}", reason(*.errno))]
    Setting {
        /// Name of the option.
        what: &'static str,
        /// Error number from Ceph.
        errno: Errno,
    },
    /// Connecting to the cluster failed.
    #[error("cannot connect to the cluster: {}", connect_reason(*.errno))]
    Connect {
        /// Error number from Ceph.
        errno: Errno,
    },
    /// The pool cannot be opened.
    #[error("pool {pool}: {}", if *.errno == libc::ENOENT { "there is no such pool".into() } else { reason(*.errno) })]
    Pool {
        /// Name of the pool.
        pool: String,
        /// Error number from Ceph.
        errno: Errno,
    },
    /// The image, or the requested snapshot of the image, cannot be opened.
    #[error("{image}: {}", if *.errno == libc::ENOENT { format!("there is no such {what}") } else { reason(*.errno) })]
    Image {
        /// Name of the image, with the snapshot if one was requested.
        image: String,
        /// Kind of the missing object, image or snapshot, for the message if `errno` is `ENOENT`.
        what: &'static str,
        /// Error number from Ceph.
        errno: Errno,
    },
    /// The image exists, but cannot be used as a device.
    #[error("{image}: {why}")]
    Unsupported {
        /// Name of the image.
        image: String,
        /// Reason, as a sentence about the image.
        why: &'static str,
    },
    /// The cluster did not reply in time.
    #[error("{image}: the cluster did not answer within {within:?}")]
    Timeout {
        /// Name of the image.
        image: String,
        /// Time waited for the cluster.
        within: Duration,
    },
    /// The thread of the image, or the timer thread, could not be started.
    #[error("cannot start the thread of an image: {0}")]
    Thread(io::Error),
}

fn path_suffix(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!("={}", path.display()))
}

fn conf_reason(errno: Errno, is_given: bool) -> String {
    match (errno, is_given) {
        (libc::ENOENT, true) => "there is no such file".into(),
        (libc::ENOENT, false) => {
            "no configuration of Ceph was found ($CEPH_CONF, /etc/ceph/ceph.conf); say where it is with conf=FILE"
                .into()
        }
        (libc::EINVAL, _) => "the file is not a Ceph configuration".into(),
        (libc::EPERM | libc::EACCES, _) => "the file cannot be read".into(),
        _ => reason(errno),
    }
}

fn connect_reason(errno: Errno) -> String {
    match errno {
        libc::ENOENT => "the keyring of the user, or the list of monitors, was not found".into(),
        libc::EPERM | libc::EACCES => {
            "the cluster refuses this user or its key, or the keyring was not found".into()
        }
        libc::ETIMEDOUT => "no monitor answered in time".into(),
        _ => reason(errno),
    }
}

/// Returns a description of a Ceph error number for users.
pub fn reason(errno: Errno) -> String {
    match errno {
        libc::ENOENT => "the image or its pool is gone".into(),
        libc::EPERM | libc::EACCES => "Ceph does not allow it to this user".into(),
        libc::EROFS => "the image cannot be written: it is a snapshot, or another client has its lock".into(),
        libc::ENOSPC | libc::EDQUOT => "the cluster or the pool is full".into(),
        libc::ETIMEDOUT => "the cluster did not answer in time".into(),
        // Ceph's `EBLOCKLISTED` has the number of `ESHUTDOWN`.
        libc::ESHUTDOWN => {
            "the cluster has blocklisted this client: another one took the image over; remove the device and make it again".into()
        }
        _ => io::Error::from_raw_os_error(errno).to_string(),
    }
}

/// Maps the error number of a failed request to a device error.
pub fn request_error(errno: Errno) -> Error {
    match errno {
        libc::EROFS => Error::ReadOnly,
        libc::ENOSPC | libc::EDQUOT => Error::NoSpace,
        libc::ENOMEM => Error::NoMemory,
        _ => Error::Media,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_messages_name_remedy() {
        let text = |error: SetupError| error.to_string();
        let lost = text(SetupError::NoLibrary { library: "librbd.so.1".into(), why: "not found".into() });
        assert_eq!(lost, "librbd.so.1 cannot be loaded; Debian's package librbd1 has it (not found)");
        let none = text(SetupError::Conf { path: None, errno: libc::ENOENT });
        assert!(none.starts_with("conf: no configuration of Ceph was found"), "{none}");
        let hidden = text(SetupError::Conf { path: Some("/x".into()), errno: libc::EACCES });
        assert_eq!(hidden, "conf=/x: the file cannot be read");
        let bad = text(SetupError::Conf { path: Some("/x".into()), errno: libc::ENOENT });
        assert_eq!(bad, "conf=/x: there is no such file");
        assert_eq!(
            text(SetupError::Pool { pool: "p".into(), errno: libc::ENOENT }),
            "pool p: there is no such pool"
        );
        assert!(reason(libc::ESHUTDOWN).contains("blocklisted"));
        assert_eq!(request_error(libc::EDQUOT), Error::NoSpace);
        assert_eq!(request_error(libc::ESHUTDOWN), Error::Media);
    }
}
