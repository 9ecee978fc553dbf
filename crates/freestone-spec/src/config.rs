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

use std::fs;
use std::io::{self, Read as _};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone::budget;
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::access::AccessWords;
use crate::aliases;
use crate::entries::{Entries, SpecError, nearest};
use crate::handshake::HandshakeWords;
use crate::http::HttpWords;
use crate::keys::joined;
use crate::kinds::registry::MAX_DEVICES;
use crate::layers::NUMBER;
use crate::limits::{self, LimitWords};
use crate::metrics::MetricsWords;
use crate::numbers::{integer, parse_in_range};
use crate::size;
use crate::times;
use crate::tls::TlsWords;

/// Size of the largest configuration file accepted, in bytes. Limits the memory used if the path of
/// another file is given by mistake.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Smallest value of `save_every`, the interval between saves. With a shorter one, saves would run
/// continuously.
const SAVE_EVERY_MIN: Duration = Duration::from_secs(1);
const SAVE_AFTER_MIN_BYTES: u64 = 1 << 20;

/// Allowed values of `max_connections`, the maximum number of NBD connections.
pub const MAX_CONNECTIONS_RANGE: RangeInclusive<i64> = 1..=65_536;

const TOP_KEYS: [&str; 38] = [
    "nbd",
    "allow",
    "ublk",
    "control",
    "control_read_only",
    "state",
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
const EXPORT_KEYS: [&str; 11] =
    joined(&["nbd", "vhost_user", "ublk", "queues", "read_only", "allow"], &limits::KEYS, &[]);

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

/// A `[[device]]` table of the file, which specifies `count` devices.
#[derive(Debug, PartialEq)]
pub struct DeviceWords {
    /// Name, kind and keys of the device.
    pub entries: Entries,
    /// Exports of the device, in addition to those on the addresses of the server.
    pub exports: Vec<ExportWords>,
    /// Number of devices. `%n` in a text is replaced by the number of each device. `None` specifies
    /// one device, without a number.
    count: Option<usize>,
    /// Line number in the file of `[[device]]`.
    line: usize,
    /// Line number of each key.
    key_lines: Vec<(String, usize)>,
}

/// Export of a device, not checked yet. Exactly one of `nbd`, `vhost_user` and `ublk` is set.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExportWords {
    /// NBD address of the export.
    pub nbd: Option<String>,
    /// Address of a vhost-user socket, `unix:PATH`.
    pub vhost_user: Option<String>,
    /// True if the export is a ublk block device of this machine.
    pub ublk: bool,
    /// Number of queues of the ublk block device, or `None` for the default.
    pub queues: Option<u16>,
    /// True if the export is read-only.
    pub read_only: bool,
    /// Clients that may connect to the export. `None` allows every client.
    pub allow: Option<Vec<String>>,
    /// I/O and connection limits of the export.
    pub limits: LimitWords,
    /// Line number of the export in the file.
    pub line: usize,
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

impl DeviceWords {
    /// Returns the line number of `[[device]]` in the file.
    pub fn line(&self) -> usize {
        self.line
    }

    /// Returns the line number of the key that `error` names, or that of `[[device]]` if it names
    /// none.
    pub fn line_of(&self, error: &SpecError) -> usize {
        let line_of_key = |key| self.key_lines.iter().find(|(known, _)| known == key);
        error.key().and_then(line_of_key).map_or(self.line, |(_, line)| *line)
    }

    /// Returns all `count` devices and their exports, with `%n` replaced by the number of each
    /// device.
    pub fn expand(&self) -> Vec<(Entries, Vec<ExportWords>)> {
        let Some(count) = self.count else { return vec![(self.entries.clone(), self.exports.clone())] };
        let numbered = |number: usize| {
            let at = |text: &str| text.replace(NUMBER, &number.to_string());
            let mut entries = self.entries.clone();
            let name = &self.entries.name;
            entries.name = if name.contains(NUMBER) { at(name) } else { format!("{name}-{number}") };
            entries.pairs.iter_mut().for_each(|(_, value)| *value = at(value));
            let mut exports = self.exports.clone();
            for export in &mut exports {
                export.nbd = export.nbd.as_deref().map(at);
                export.vhost_user = export.vhost_user.as_deref().map(at);
            }
            (entries, exports)
        };
        (0..count).map(numbered).collect()
    }
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
            ("ublk", _) => return error_at_key("ublk: must be true or false"),
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
    let time = times::parse(text)?;
    if time < SAVE_EVERY_MIN { Err("at least 1s".into()) } else { Ok(time) }
}

/// Parses the value of `save_after`, the number of changed bytes after which a save starts.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_save_after(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    if bytes < SAVE_AFTER_MIN_BYTES { Err("at least 1M".into()) } else { Ok(bytes) }
}

/// Parses the value of `max_memory_in_flight`, and returns it in bytes.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_memory_in_flight(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    if bytes < budget::MIN_BYTES {
        return Err(format!(
            "must be at least {}, twice the largest request",
            size::exact(budget::MIN_BYTES)
        ));
    }
    Ok(bytes)
}

fn device(
    lines: &Lines<'_>,
    number: usize,
    mut table: DeTable<'_>,
    span: &Range<usize>,
) -> Result<DeviceWords, KeyError> {
    let at = |(key, _): (&Spanned<DeString<'_>>, _)| {
        (aliases::canonical_device_key(key.get_ref()).to_owned(), lines.number(&key.span()))
    };
    let key_lines = table.iter().map(at).collect();
    let mut text = |key: &str| match table.remove(key).map(|value| (value.span(), value.into_inner())) {
        Some((_, DeValue::String(text))) => Ok(text.into_owned()),
        Some((span, _)) => Err((Some(span), format!("device {number}: {key}: must be a text"))),
        None => error_at_key(format!("device {number}: {key} is missing")),
    };
    let entries = Entries::new(&text("name")?, &text("kind")?).map_err(|e| (None, e.to_string()))?;
    let line = lines.number(span);
    let mut device = DeviceWords { entries, exports: Vec::new(), count: None, line, key_lines };
    for (key, value) in table {
        let span = key.span();
        device
            .take(lines, key.get_ref(), value.into_inner())
            .map_err(|(span_of_error, why)| (span_of_error.or(Some(span)), why))?;
    }
    if device.entries.name.contains(NUMBER) && device.count.is_none() {
        return error_at_key(format!("{}: {NUMBER} is for count", device.entries.name));
    }
    Ok(device)
}

impl DeviceWords {
    fn take(&mut self, lines: &Lines<'_>, key: &DeString<'_>, value: DeValue<'_>) -> Result<(), KeyError> {
        let name = self.entries.name.clone();
        let value = match (key.as_ref(), value) {
            ("count", value) => {
                let number = integer(&value).and_then(|number| usize::try_from(number).ok());
                let Some(count @ 1..=MAX_DEVICES) = number else {
                    return error_at_key(format!("{name}: count: must be a number from 1 to {MAX_DEVICES}"));
                };
                self.count = Some(count);
                return Ok(());
            }
            ("export", DeValue::Table(table)) => return self.export(lines, table, None),
            ("export", DeValue::Array(list)) => {
                for entry in list {
                    let span = entry.span();
                    let DeValue::Table(table) = entry.into_inner() else {
                        return Err((Some(span), format!("{name}: {EXPORT_FORM}")));
                    };
                    self.export(lines, table, Some(span))?;
                }
                return Ok(());
            }
            ("export", _) => return error_at_key(format!("{name}: {EXPORT_FORM}")),
            (_, DeValue::String(text)) => text.into_owned(),
            (_, DeValue::Boolean(yes)) => if yes { "yes" } else { "no" }.into(),
            // If the key needs a size with a unit, the number is refused later, with the same
            // message as on the command line.
            (key, value @ DeValue::Integer(_)) => match integer(&value) {
                Some(number) => number.to_string(),
                None => return error_at_key(format!("{name}: {key}: the number is too large")),
            },
            (key, other) => {
                let is = other.type_str();
                return error_at_key(format!(
                    "{name}: {key}: must be a text, a number or a boolean, not {is}"
                ));
            }
        };
        self.entries.add_with_warning(key, &value).map_err(|e| (None, e.to_string()))
    }

    fn export(
        &mut self,
        lines: &Lines<'_>,
        table: DeTable<'_>,
        span: Option<Range<usize>>,
    ) -> Result<(), KeyError> {
        let name = &self.entries.name;
        let mut export = ExportWords {
            line: span.as_ref().map_or(self.line, |span| lines.number(span)),
            ..ExportWords::default()
        };
        for (key, value) in table {
            let at = Some(key.span());
            let value = value.into_inner();
            match (key.get_ref().as_ref(), &value) {
                ("nbd", DeValue::String(address)) => export.nbd = Some(address.to_string()),
                ("vhost_user", DeValue::String(address)) => export.vhost_user = Some(address.to_string()),
                ("ublk", DeValue::Boolean(yes)) => export.ublk = *yes,
                ("read_only", DeValue::Boolean(yes)) => export.read_only = *yes,
                ("allow", value) => {
                    let list = string_list("allow", value);
                    export.allow = Some(list.map_err(|why| (at, format!("{name}: export: {why}")))?);
                }
                ("queues", _) => match integer(&value).and_then(|number| u16::try_from(number).ok()) {
                    Some(queues) => export.queues = Some(queues),
                    None => return Err((at, format!("{name}: export: queues: must be a number"))),
                },
                (key @ ("nbd" | "vhost_user"), _) => {
                    return Err((at, format!("{name}: export: {key}: must be an address as a text")));
                }
                (key @ ("ublk" | "read_only"), _) => {
                    return Err((at, format!("{name}: export: {key}: must be true or false")));
                }
                (key, value) if limits::KEYS.contains(&key) => {
                    let taken = limits::take_toml(&mut export.limits, key, value);
                    taken.map_err(|why| (at, format!("{name}: export: {why}")))?;
                }
                (other, _) => {
                    let hint = nearest(other, &EXPORT_KEYS).map(|h| format!("; {h}?")).unwrap_or_default();
                    let keys = EXPORT_KEYS.join(", ");
                    return Err((
                        at,
                        format!("{name}: export: unknown key {other:?}{hint}; the keys are {keys}"),
                    ));
                }
            }
        }
        let places = [export.nbd.is_some(), export.vhost_user.is_some(), export.ublk];
        if places.iter().filter(|place| **place).count() != 1 {
            return Err((span, format!("{name}: {EXPORT_FORM}")));
        }
        if export.allow.is_some() && export.ublk {
            return Err((span, format!("{name}: export: allow: not with ublk")));
        }
        if export.queues.is_some() && !export.ublk {
            return Err((span, format!("{name}: export: queues: only with ublk")));
        }
        self.exports.push(export);
        Ok(())
    }
}

const EXPORT_FORM: &str =
    "export: write { nbd = ADDRESS }, { vhost_user = 'unix:PATH' } or { ublk = true }, and a list of several";

#[cfg(test)]
mod tests;
