//! Why an image cannot be had, and what Ceph's error numbers mean here.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone_core::device::Error;
use thiserror::Error as ThisError;

/// A positive errno.
pub type Errno = i32;

/// Why a device could not be set up. Each sentence says what to do where that is known.
#[derive(Debug, ThisError)]
pub enum SetupError {
    /// The library is not there.
    #[error("{library} cannot be loaded; Debian's package librbd1 has it ({why})")]
    NoLibrary {
        /// Its file.
        library: String,
        /// What the loader says.
        why: String,
    },
    /// The library is another one than is known.
    #[error("{library} has no {function}; version 16 (Pacific) of Ceph or a later one is needed")]
    OldLibrary {
        /// Its file.
        library: String,
        /// What is missing.
        function: &'static str,
    },
    /// The configuration of Ceph.
    #[error("conf{}: {}", at(.path.as_deref()), conf_reason(*.errno, .path.is_some()))]
    Conf {
        /// Where it is; none: where Ceph looks for it.
        path: Option<PathBuf>,
        /// What is wrong.
        errno: Errno,
    },
    /// A value that Ceph does not take.
    #[error("{what} cannot be used: {}", reason(*.errno))]
    Setting {
        /// Which one.
        what: &'static str,
        /// What is wrong.
        errno: Errno,
    },
    /// The cluster.
    #[error("cannot connect to the cluster: {}", connect_reason(*.errno))]
    Connect {
        /// What is wrong.
        errno: Errno,
    },
    /// The pool.
    #[error("pool {pool}: {}", if *.errno == libc::ENOENT { "there is no such pool".into() } else { reason(*.errno) })]
    Pool {
        /// Its name.
        pool: String,
        /// What is wrong.
        errno: Errno,
    },
    /// The image, or its snapshot.
    #[error("{image}: {}", if *.errno == libc::ENOENT { format!("there is no such {what}") } else { reason(*.errno) })]
    Image {
        /// Its name, with that of the snapshot.
        image: String,
        /// What was asked for.
        what: &'static str,
        /// What is wrong.
        errno: Errno,
    },
    /// It cannot be a device.
    #[error("{image}: {why}")]
    Unfit {
        /// Its name.
        image: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Nobody answered.
    #[error("{image}: the cluster did not answer within {within:?}")]
    Silent {
        /// The image.
        image: String,
        /// For so long.
        within: Duration,
    },
    /// No thread.
    #[error("cannot start the thread of an image: {0}")]
    Thread(io::Error),
}

fn at(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!("={}", path.display()))
}

fn conf_reason(errno: Errno, said: bool) -> String {
    match (errno, said) {
        (libc::ENOENT, true) => "there is no such file".into(),
        (libc::ENOENT, false) => {
            "no configuration of Ceph was found ($CEPH_CONF, /etc/ceph/ceph.conf); say where it is with conf=FILE"
                .into()
        }
        (libc::EINVAL, _) => "it is no configuration of Ceph".into(),
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

/// What an error number of Ceph means to who reads it.
pub fn reason(errno: Errno) -> String {
    match errno {
        libc::ENOENT => "the image or its pool is gone".into(),
        libc::EPERM | libc::EACCES => "Ceph does not allow it to this user".into(),
        libc::EROFS => "the image cannot be written: it is a snapshot, or another client has its lock".into(),
        libc::ENOSPC | libc::EDQUOT => "the cluster or the pool is full".into(),
        libc::ETIMEDOUT => "the cluster did not answer in time".into(),
        // EBLOCKLISTED of Ceph.
        libc::ESHUTDOWN => {
            "the cluster has blocklisted this client: another one took the image over; remove the device and make it again".into()
        }
        _ => io::Error::from_raw_os_error(errno).to_string(),
    }
}

/// What a request is answered that ended so.
pub fn of_request(errno: Errno) -> Error {
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
    fn sentences_say_what_to_do() {
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
        assert_eq!(of_request(libc::EDQUOT), Error::NoSpace);
        assert_eq!(of_request(libc::ESHUTDOWN), Error::Media);
    }
}
