//! Client configuration.

use std::path::PathBuf;
use std::time::Duration;

use crate::uri::Uri;

/// Default number of connections to a server that supports several.
pub const DEFAULT_CONNECTIONS: usize = 4;
/// Maximum number of connections of a device; each has a thread.
pub const MAX_CONNECTIONS: usize = 16;
/// Default time for which requests wait for an unreachable server.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Smallest value of [`Config::timeout`]. Smaller values are raised to it.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest value of [`Config::timeout`]. Larger values are lowered to it.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Certificate and key files for TLS.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TlsFiles {
    /// File of CA certificates that may sign the server's certificate; `None` uses those of the
    /// system.
    pub ca: Option<PathBuf>,
    /// File of the client certificate.
    pub cert: Option<PathBuf>,
    /// File of the private key of the client certificate.
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
    /// guarantee that all connections see the same data.
    pub connections: usize,
    /// Time for which a request waits for a server that is unreachable or does not reply, before it
    /// fails.
    pub timeout: Duration,
    /// True if the device refuses writes.
    pub read_only: bool,
    /// TLS files, used if the scheme of the URI is `nbds`.
    pub tls: TlsFiles,
}

impl Config {
    /// Returns the default options for `uri`. The device is named after the URI.
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
