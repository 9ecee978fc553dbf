//! Client configuration.

use std::path::PathBuf;
use std::time::Duration;

use crate::uri::Uri;

/// Default number of connections, if the server supports several.
pub const DEFAULT_CONNECTIONS: usize = 4;
/// Maximum number of connections of a device; each has a thread.
pub const MAX_CONNECTIONS: usize = 16;
/// Default time that requests wait for an unreachable server.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Smallest [`Config::timeout`].
pub const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest [`Config::timeout`].
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Certificate and key files for TLS.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TlsFiles {
    /// CA certificates that may sign the server's certificate; `None` uses the system's.
    pub ca: Option<PathBuf>,
    /// Client certificate.
    pub cert: Option<PathBuf>,
    /// Private key of the client certificate.
    pub key: Option<PathBuf>,
    /// Expected host name in the server's certificate; `None` uses the host of the URI.
    pub hostname: Option<String>,
}

/// Options for opening an [`Nbd`](crate::Nbd) device.
#[derive(Debug, Clone)]
pub struct Config {
    /// URI of the export.
    pub uri: Uri,
    /// Name of the device in log lines.
    pub name: String,
    /// Number of connections, 1 to [`MAX_CONNECTIONS`]. Only one is used if the server does not
    /// guarantee that several see the same data.
    pub connections: usize,
    /// Time that a request waits for a server that is unreachable or does not reply.
    pub timeout: Duration,
    /// Serves only reads.
    pub read_only: bool,
    /// TLS files, used with `nbds`.
    pub tls: TlsFiles,
}

impl Config {
    /// Returns options with defaults, with the URI as the device's name.
    pub fn new(uri: Uri) -> Self {
        Self {
            name: uri.to_string(),
            uri,
            connections: DEFAULT_CONNECTIONS,
            timeout: DEFAULT_TIMEOUT,
            read_only: false,
            tls: TlsFiles::default(),
        }
    }
}
