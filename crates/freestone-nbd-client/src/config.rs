//! What is to be opened, and how.

use std::path::PathBuf;
use std::time::Duration;

use crate::uri::Uri;

/// Connections of a device, where the server allows so many.
pub const DEFAULT_CONNECTIONS: usize = 4;
/// Most connections of a device; each has a thread.
pub const MAX_CONNECTIONS: usize = 16;
/// How long requests wait for a server that is away, unless that is said.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest and longest of these times.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// See [`MIN_TIMEOUT`].
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Whom TLS trusts, and what this side shows of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TlsFiles {
    /// Certificates, one of which has to stand behind the server's; none: those of the system.
    pub ca: Option<PathBuf>,
    /// The certificate that is shown to the server.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The name that the server's certificate has to have; none: the host's.
    pub hostname: Option<String>,
}

/// What is to be opened, and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// The export.
    pub uri: Uri,
    /// What the log calls the device.
    pub name: String,
    /// Connections, 1 to [`MAX_CONNECTIONS`]; one where the server does not say that several see
    /// the same.
    pub connections: usize,
    /// How long a request waits for a server that is away or does not answer.
    pub timeout: Duration,
    /// Serve reads only.
    pub read_only: bool,
    /// For `nbds`.
    pub tls: TlsFiles,
}

impl Config {
    /// All by default.
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
