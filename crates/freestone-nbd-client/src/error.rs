//! Errors of connections and of device setup.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

/// Reason why a connection could not be opened, or ended.
#[derive(Debug, Error)]
pub enum LinkError {
    /// Connecting failed.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The host name could not be resolved.
    #[error("the host is not known: {0}")]
    Host(io::Error),
    /// The server did not reply within the timeout.
    #[error("the server did not answer within {0:?}")]
    Timeout(Duration),
    /// The connection broke.
    #[error("the connection was lost: {0}")]
    Lost(io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server announced its shutdown.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server violated the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refused the export.
    #[error("the server refused the export: {0}")]
    Refused(String),
    /// The export is not usable as a device.
    #[error("{0}")]
    Unusable(String),
    /// TLS could not be started.
    #[error("TLS: {0}")]
    Tls(String),
    /// The device is being dropped.
    #[error("the device is being removed")]
    Stopped,
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Errors from opening a device.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The server or its export is not usable.
    #[error("{uri}: {source}")]
    Link {
        /// URI of the export.
        uri: String,
        /// Reason why the export cannot be used.
        source: LinkError,
    },
    /// A certificate or key file is not usable.
    #[error("{key}={}: {why}", path.display())]
    Certificate {
        /// Name of the option that sets the file, such as `tls_ca`.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Reason why the file cannot be used.
        why: String,
    },
    /// The local TLS configuration is invalid.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// A thread or file descriptor could not be created.
    #[error("cannot start a connection's thread: {0}")]
    Thread(io::Error),
}
