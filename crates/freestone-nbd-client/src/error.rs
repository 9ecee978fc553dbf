//! Why an export cannot be had, and why a connection to it ends.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

/// Why a connection is not made, or ends. The sentence names what the server did.
#[derive(Debug, Error)]
pub enum LinkError {
    /// Nobody answers there.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The name of the host is not known.
    #[error("the host is not known: {0}")]
    Host(io::Error),
    /// The server said nothing for too long.
    #[error("the server did not answer within {0:?}")]
    Silent(Duration),
    /// The connection broke.
    #[error("the connection was lost: {0}")]
    Lost(io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server says that it is going away.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refused the export.
    #[error("the server refused the export: {0}")]
    Refused(String),
    /// The export cannot be used.
    #[error("{0}")]
    Unfit(String),
    /// TLS could not be begun.
    #[error("TLS: {0}")]
    Tls(String),
    /// The device ends.
    #[error("the device is being removed")]
    Ending,
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Why a device could not be set up.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The server, or its export.
    #[error("{uri}: {source}")]
    Link {
        /// The export.
        uri: String,
        /// What went wrong.
        source: LinkError,
    },
    /// A file of certificates.
    #[error("{key}={}: {why}", path.display())]
    Certificate {
        /// Which one.
        key: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The TLS of this side.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// No thread, or no descriptor.
    #[error("cannot start a connection's thread: {0}")]
    Thread(io::Error),
}
