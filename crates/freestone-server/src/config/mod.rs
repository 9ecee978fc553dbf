//! Configuration file, in TOML, of the commands `serve --config`, `apply` and `dump`. It supports
//! everything that the command line does. The parser checks names and types; callers check device
//! keys, addresses and paths.
//!
//! ```toml
//! nbd = ["unix:/run/freestone/nbd.sock"]
//! control = "/run/freestone/control.sock"
//!
//! [[device]]
//! name = "golden"
//! kind = "file"
//! path = "golden.img"
//! readonly = true
//!
//! [[device]]
//! name = "job-%n"
//! kind = "fork"
//! base = "golden"
//! count = 8
//! export = [{ nbd = "unix:/run/job-%n.sock" }, { ublk = true, queues = 2 }]
//! ```
//!
//! The room owns nothing. Rooms above it combine the settings with the command line (`settings`) and check devices
//! (`declared`).

pub mod access;
mod device;
pub mod handshake;
pub mod http;
pub mod metrics;
pub mod tls;

use std::fs;
use std::io::{self, Read as _};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone::budget;
use freestone_spec::entries::nearest;
use freestone_spec::numbers::parse_in_range;
use freestone_spec::{aliases, size, times};
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use self::access::AccessWords;
use self::device::device;
pub use self::device::{DeviceWords, ExportWords};
use self::handshake::HandshakeWords;
use self::http::HttpWords;
use self::metrics::MetricsWords;
use self::tls::TlsWords;

/// Size of the largest configuration file accepted, in bytes. Limits the memory used if the path of
/// another file is given by mistake.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Smallest value of `save_every`, the interval between saves. With a shorter one, saves would run
/// continuously.
const SAVE_EVERY_MIN: Duration = Duration::from_secs(1);
const SAVE_AFTER_MIN_BYTES: u64 = 1 << 20;

/// Allowed values of `max_connections`, the maximum number of NBD connections.
pub const MAX_CONNECTIONS_RANGE: RangeInclusive<i64> = 1..=65_536;

const TOP_KEYS: [&str; 39] = [
    "nbd",
    "allow",
    "ublk",
    "control",
    "control_read_only",
    "state",
    "recoverable",
    "save_every",
    "save_after",
    "save_timeout",
    "socket_mode",
    "socket_user",
    "socket_group",
    "control_mode",
    "control_user",
    "control_group",
    "control_read_only_mode",
    "control_read_only_user",
    "control_read_only_group",
    "tls",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "tls_client_crl",
    "allow_plaintext",
    "max_connections",
    "max_memory_in_flight",
    "max_pending_handshakes",
    "handshake_grace",
    "max_connect_rate",
    "handshake_idle_timeout",
    "handshake_timeout",
    "handshake_bytes",
    "metrics",
    "metrics_open",
    "metrics_forks",
    "http",
    "http_open",
    "device",
];
/// Content of a configuration file. Relative paths start at the directory of the file, `base`.
#[derive(Debug, Default, PartialEq)]
pub struct FileConfig {
    /// Devices in the order of the file. The keys and values of the devices are not checked yet.
    pub devices: Vec<DeviceWords>,
    /// NBD addresses on which the server listens, not checked yet.
    pub nbd: Vec<String>,
    /// Clients that may connect to the addresses in `nbd`, not checked yet. `None` allows all.
    pub allow: Option<Vec<String>>,
    /// True to also provide every published device as a ublk block device.
    pub ublk: bool,
    /// Path of the control socket, or `None` without one.
    pub control: Option<PathBuf>,
    /// Path of the read-only control socket, or `None` without one.
    pub control_read_only: Option<PathBuf>,
    /// Path of the state directory, from which the next start of the server restores devices and
    /// exports.
    pub state: Option<PathBuf>,
    /// True if devices in memory survive a killed server.
    pub recoverable: bool,
    /// Interval between saves of the content of devices with `keep=yes`.
    pub save_every: Option<Duration>,
    /// Number of changed bytes after which a save starts before the interval ends.
    pub save_after: Option<u64>,
    /// Maximum time that the shutdown of the server waits for the last save.
    pub save_timeout: Option<Duration>,
    /// Permissions and owner of the Unix sockets of exports.
    pub sockets: AccessWords,
    /// Permissions and owner of the control socket.
    pub control_socket: AccessWords,
    /// Permissions and owner of the read-only control socket.
    pub control_read_only_socket: AccessWords,
    /// TLS settings of the NBD server.
    pub tls: TlsWords,
    /// Maximum number of NBD connections to the server, or `None` for the default.
    pub max_connections: Option<u32>,
    /// Maximum memory for the data of requests in flight, in bytes.
    pub max_memory_in_flight: Option<u64>,
    /// Limits of NBD clients during the handshake.
    pub handshake: HandshakeWords,
    /// Settings of the metrics endpoint.
    pub metrics: MetricsWords,
    /// Settings of the HTTP status page: `http` and `http_open`.
    pub http: HttpWords,
    /// Directory of the configuration file, at which relative paths start.
    pub base: PathBuf,
}

/// Errors from reading a configuration file.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the file", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// The absolute path of the file's directory cannot be determined.
    #[error("{}: cannot find its directory", .0.display())]
    Directory(PathBuf, #[source] io::Error),
    /// The content is invalid. The message names the file and the line.
    #[error("{0}")]
    Content(String),
}

/// Reads and parses a configuration file.
pub fn read(path: &Path) -> Result<FileConfig, ConfigError> {
    let (at, mut text) = (path.display(), String::new());
    fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
        .map_err(|error| ConfigError::Read(path.to_owned(), error))?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(ConfigError::Content(format!("{at}: larger than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    let mut config = parse(&text).map_err(|why| ConfigError::Content(format!("{at}: {why}")))?;
    let whole = std::path::absolute(path).map_err(|error| ConfigError::Directory(path.to_owned(), error))?;
    config.base = whole.parent().map(Path::to_path_buf).unwrap_or_default();
    Ok(config)
}

/// Parses the content of a configuration file. The field `base` stays empty.
///
/// # Errors
/// Returns a message of the form `line N: REASON`.
pub fn parse(text: &str) -> Result<FileConfig, String> {
    let lines = Lines(text);
    let table = DeTable::parse(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        lines.message(&span, &error.message().replace('\n', ", "))
    })?;
    let mut config = FileConfig::default();
    for (key, value) in table.into_inner() {
        let span = key.span();
        config
            .take(&lines, aliases::canonical_key(key.get_ref()), value)
            .map_err(|(span_of_error, why)| lines.message(&span_of_error.unwrap_or(span), &why))?;
    }
    Ok(config)
}

/// Text of the file, from which line numbers are computed.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn number(&self, span: &Range<usize>) -> usize {
        self.0.get(..span.start).unwrap_or(self.0).matches('\n').count() + 1
    }

    fn message(&self, span: &Range<usize>, why: &str) -> String {
        format!("line {}: {why}", self.number(span))
    }
}

/// Error about a key: the byte range in the text, or `None` for the range of the key itself, and
/// the reason.
type KeyError = (Option<Range<usize>>, String);

fn error_at_key<T>(why: impl Into<String>) -> Result<T, KeyError> {
    Err((None, why.into()))
}

impl FileConfig {
    fn take(&mut self, lines: &Lines<'_>, key: &str, value: Spanned<DeValue<'_>>) -> Result<(), KeyError> {
        match (key, value.into_inner()) {
            ("nbd", value) => self.nbd = string_list(key, &value).map_err(|why| (None, why))?,
            ("allow", value) => self.allow = Some(string_list(key, &value).map_err(|why| (None, why))?),
            ("ublk", DeValue::Boolean(yes)) => self.ublk = yes,
            ("recoverable", DeValue::Boolean(yes)) => self.recoverable = yes,
            (key @ ("ublk" | "recoverable"), _) => {
                return error_at_key(format!("{key}: must be true or false"));
            }
            ("control", DeValue::String(path)) => self.control = Some(PathBuf::from(&*path)),
            ("control_read_only", DeValue::String(path)) => {
                self.control_read_only = Some(PathBuf::from(&*path));
            }
            ("control" | "control_read_only", _) => {
                return error_at_key(format!("{key}: must be a path as a text"));
            }
            ("state", DeValue::String(path)) => self.state = Some(PathBuf::from(&*path)),
            ("state", _) => return error_at_key("state: must be a path as a text"),
            ("save_every", DeValue::String(text)) => {
                self.save_every =
                    Some(parse_save_every(&text).map_err(|why| value_error("save_every", &text, &why))?);
            }
            ("save_after", DeValue::String(text)) => {
                self.save_after =
                    Some(parse_save_after(&text).map_err(|why| value_error("save_after", &text, &why))?);
            }
            ("save_timeout", DeValue::String(text)) => {
                let time = times::parse(&text).map_err(|why| value_error("save_timeout", &text, &why))?;
                self.save_timeout = Some(time);
            }
            (key @ ("save_every" | "save_timeout"), _) => {
                return error_at_key(format!("{key}: must be a time as a text, for example '10m'"));
            }
            ("save_after", _) => {
                return error_at_key("save_after: must be a size as a text, for example '256M'");
            }
            ("socket_mode" | "socket_user" | "socket_group", value) => {
                self.sockets.take(key, &value).map_err(|why| (None, why))?;
            }
            ("control_mode" | "control_user" | "control_group", value) => {
                self.control_socket.take(key, &value).map_err(|why| (None, why))?;
            }
            ("control_read_only_mode" | "control_read_only_user" | "control_read_only_group", value) => {
                self.control_read_only_socket.take(key, &value).map_err(|why| (None, why))?;
            }
            (
                "max_pending_handshakes"
                | "handshake_grace"
                | "max_connect_rate"
                | "handshake_idle_timeout"
                | "handshake_timeout"
                | "handshake_bytes",
                value,
            ) => self.handshake.take(key, &value).map_err(|why| (None, why))?,
            (
                "tls" | "tls_cert" | "tls_key" | "tls_client_ca" | "tls_client_crl" | "allow_plaintext",
                value,
            ) => {
                self.tls.take(key, &value).map_err(|why| (None, why))?;
            }
            (key @ "max_connections", value) => {
                self.max_connections =
                    Some(parse_in_range(key, &value, MAX_CONNECTIONS_RANGE).map_err(|why| (None, why))?);
            }
            ("metrics" | "metrics_open" | "metrics_forks", value) => {
                self.metrics.take(key, &value).map_err(|why| (None, why))?;
            }
            ("http" | "http_open", value) => {
                self.http.take(key, &value).map_err(|why| (None, why))?;
            }
            ("max_memory_in_flight", DeValue::String(text)) => {
                let bytes = parse_memory_in_flight(&text);
                let bytes = bytes.map_err(|why| (None, format!("max_memory_in_flight={text}: {why}")))?;
                self.max_memory_in_flight = Some(bytes);
            }
            ("max_memory_in_flight", _) => {
                return error_at_key("max_memory_in_flight: must be a size as a text, for example '256M'");
            }
            ("device", DeValue::Array(list)) => {
                for (index, entry) in list.into_iter().enumerate() {
                    let span = entry.span();
                    let DeValue::Table(table) = entry.into_inner() else {
                        return Err((Some(span), "device: write [[device]]".into()));
                    };
                    let device = device(lines, index + 1, table, &span);
                    self.devices
                        .push(device.map_err(|(span_of_error, why)| (span_of_error.or(Some(span)), why))?);
                }
            }
            ("device", _) => return error_at_key("device: write [[device]], with two brackets"),
            (other, _) => {
                let hint = nearest(other, &TOP_KEYS).map(|h| format!("; {h}?")).unwrap_or_default();
                let keys = TOP_KEYS.join(", ");
                return error_at_key(format!("unknown key {other:?}{hint}; the keys are {keys}"));
            }
        }
        Ok(())
    }
}

/// Parses a TOML string or list of strings. The error message names the key.
fn string_list(key: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.clone().into_owned()),
        _ => Err(format!("{key}: must be a text or a list of texts")),
    };
    match value {
        DeValue::Array(list) => list.iter().map(|entry| text(entry.get_ref())).collect(),
        value => Ok(vec![text(value)?]),
    }
}

fn value_error(key: &str, text: &str, why: &str) -> KeyError {
    (None, format!("{key}={text}: {why}"))
}

/// Parses the value of `save_every`, the interval between saves.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_save_every(text: &str) -> Result<Duration, String> {
    check_save_every(times::parse(text)?)
}

/// Returns the interval between saves, or the reason why it is refused.
pub fn check_save_every(time: Duration) -> Result<Duration, String> {
    if time < SAVE_EVERY_MIN { Err("at least 1s".into()) } else { Ok(time) }
}

/// Parses the value of `save_after`, the number of changed bytes after which a save starts.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_save_after(text: &str) -> Result<u64, String> {
    check_save_after(size::parse(text).map_err(|error| error.to_string())?)
}

/// Returns the number of changed bytes after which a save starts, or the reason why it is refused.
pub fn check_save_after(bytes: u64) -> Result<u64, String> {
    if bytes < SAVE_AFTER_MIN_BYTES { Err("at least 1M".into()) } else { Ok(bytes) }
}

/// Parses the value of `max_memory_in_flight`, and returns it in bytes.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_memory_in_flight(text: &str) -> Result<u64, String> {
    check_memory_in_flight(size::parse(text).map_err(|error| error.to_string())?)
}

/// Returns the limit of memory for requests in flight, in bytes, or the reason why it is refused.
pub fn check_memory_in_flight(bytes: u64) -> Result<u64, String> {
    if bytes < budget::MIN_BYTES {
        return Err(format!(
            "must be at least {}, twice the largest request",
            size::exact(budget::MIN_BYTES)
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
