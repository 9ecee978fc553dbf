//! The file of `serve --config`, `apply` and `dump`: all that the command line can say, as TOML.
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
use crate::entries::{Entries, SpecError, nearest};
use crate::handshake::HandshakeWords;
use crate::http::HttpWords;
use crate::keys::joined;
use crate::kinds::registry::MAX_DEVICES;
use crate::layers::NUMBER;
use crate::limits::{self, LimitWords};
use crate::metrics::MetricsWords;
use crate::numbers::{integer, within};
use crate::size;
use crate::times;
use crate::tls::TlsWords;

/// More is not a list of devices; bounds what a mistyped path can make us read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Saves would run all the time.
const SAVE_EVERY_MIN: Duration = Duration::from_secs(1);
const SAVE_AFTER_MIN_BYTES: u64 = 1 << 20;

/// What `max_connections` can be.
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
    "max_newcomers",
    "newcomer_grace",
    "connects_per_second",
    "handshake_silence",
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

/// What the file says. Relative paths in it start at the directory of the file.
#[derive(Debug, Default, PartialEq)]
pub struct FileConfig {
    /// Devices in the order of the file, keys and values unchecked.
    pub devices: Vec<DeviceWords>,
    /// NBD addresses, unchecked.
    pub nbd: Vec<String>,
    /// Who may connect to these, unchecked.
    pub allow: Option<Vec<String>>,
    /// What is published is shown as block devices too.
    pub ublk: bool,
    /// Where the control socket goes.
    pub control: Option<PathBuf>,
    /// Where one goes that changes nothing.
    pub control_read_only: Option<PathBuf>,
    /// The directory of what is there after the next start.
    pub state: Option<PathBuf>,
    /// So often what devices keep is saved.
    pub save_every: Option<Duration>,
    /// When so many bytes of it have changed.
    pub save_after: Option<u64>,
    /// How long the end of the server waits for it.
    pub save_timeout: Option<Duration>,
    /// Who may connect to the sockets of devices.
    pub sockets: AccessWords,
    /// Who may connect to the control socket.
    pub control_socket: AccessWords,
    /// Who may connect to the one that changes nothing.
    pub control_read_only_socket: AccessWords,
    /// TLS of NBD.
    pub tls: TlsWords,
    /// Most NBD connections at one time.
    pub max_connections: Option<u32>,
    /// Most bytes that connections hold for requests.
    pub max_memory_in_flight: Option<u64>,
    /// What clients may take before they have an export.
    pub handshake: HandshakeWords,
    /// Who is told how busy the server is.
    pub metrics: MetricsWords,
    /// Where the page is: `http` and `http_open`.
    pub http: HttpWords,
    /// The directory of the file.
    pub base: PathBuf,
}

/// A device of the file, or as many as `count` says.
#[derive(Debug, PartialEq)]
pub struct DeviceWords {
    /// Its name, kind and keys.
    pub entries: Entries,
    /// Where it is published, beside the addresses of the server.
    pub exports: Vec<ExportWords>,
    /// So many of them; `%n` is the number of each.
    count: Option<usize>,
    /// Where it begins, and where its keys are.
    line: usize,
    lines: Vec<(String, usize)>,
}

/// A place where a device is to be seen, unchecked: one of the first three.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExportWords {
    /// An NBD address.
    pub nbd: Option<String>,
    /// The socket of a virtual machine, `unix:PATH`.
    pub vhost_user: Option<String>,
    /// A block device of this machine.
    pub ublk: bool,
    /// Of the block device.
    pub queues: Option<u16>,
    /// Nobody writes there.
    pub read_only: bool,
    /// Who may connect there; `None`: whoever can.
    pub allow: Option<Vec<String>>,
    /// What it lets through.
    pub limits: LimitWords,
    /// Where it stands.
    pub line: usize,
}

/// Why there is no such list of devices.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file is not to be had.
    #[error("{}: cannot read the file", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// What its paths start at is not to be had.
    #[error("{}: cannot find its directory", .0.display())]
    Directory(PathBuf, #[source] io::Error),
    /// What is in it cannot be meant; the sentence names file and line.
    #[error("{0}")]
    Content(String),
}

impl DeviceWords {
    /// The line where it begins.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The line of what is wrong with it.
    pub fn line_of(&self, error: &SpecError) -> usize {
        let of_key = |key| self.lines.iter().find(|(known, _)| known == key);
        error.key().and_then(of_key).map_or(self.line, |(_, line)| *line)
    }

    /// Each of the devices that it stands for, with the numbers in.
    pub fn each(&self) -> Vec<(Entries, Vec<ExportWords>)> {
        let Some(count) = self.count else { return vec![(self.entries.clone(), self.exports.clone())] };
        let one = |number: usize| {
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
        (0..count).map(one).collect()
    }
}

/// Reads the file.
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

/// Reads what is in it; `base` is not known here.
///
/// # Errors
/// `line N: ` and a sentence.
pub fn parse(text: &str) -> Result<FileConfig, String> {
    let lines = Lines(text);
    let table = DeTable::parse(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        lines.at(&span, &error.message().replace('\n', ", "))
    })?;
    let mut config = FileConfig::default();
    for (key, value) in table.into_inner() {
        let span = key.span();
        config
            .take(&lines, key.get_ref(), value)
            .map_err(|(within, why)| lines.at(&within.unwrap_or(span), &why))?;
    }
    Ok(config)
}

/// The lines of a text.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn of(&self, span: &Range<usize>) -> usize {
        self.0.get(..span.start).unwrap_or(self.0).matches('\n').count() + 1
    }

    fn at(&self, span: &Range<usize>, why: &str) -> String {
        format!("line {}: {why}", self.of(span))
    }
}

/// What is wrong, and where it is if that is not where the key is.
type Wrong = (Option<Range<usize>>, String);

fn wrong<T>(why: impl Into<String>) -> Result<T, Wrong> {
    Err((None, why.into()))
}

impl FileConfig {
    fn take(&mut self, lines: &Lines<'_>, key: &str, value: Spanned<DeValue<'_>>) -> Result<(), Wrong> {
        match (key, value.into_inner()) {
            ("nbd", value) => self.nbd = texts(key, &value).map_err(|why| (None, why))?,
            ("allow", value) => self.allow = Some(texts(key, &value).map_err(|why| (None, why))?),
            ("ublk", DeValue::Boolean(yes)) => self.ublk = yes,
            ("ublk", _) => return wrong("ublk: must be true or false"),
            ("control", DeValue::String(path)) => self.control = Some(PathBuf::from(&*path)),
            ("control_read_only", DeValue::String(path)) => {
                self.control_read_only = Some(PathBuf::from(&*path));
            }
            ("control" | "control_read_only", _) => {
                return wrong(format!("{key}: must be a path as a text"));
            }
            ("state", DeValue::String(path)) => self.state = Some(PathBuf::from(&*path)),
            ("state", _) => return wrong("state: must be a path as a text"),
            ("save_every", DeValue::String(text)) => {
                self.save_every = Some(save_every(&text).map_err(|why| of_key("save_every", &text, &why))?);
            }
            ("save_after", DeValue::String(text)) => {
                self.save_after = Some(save_after(&text).map_err(|why| of_key("save_after", &text, &why))?);
            }
            ("save_timeout", DeValue::String(text)) => {
                let time = times::parse(&text).map_err(|why| of_key("save_timeout", &text, &why))?;
                self.save_timeout = Some(time);
            }
            (key @ ("save_every" | "save_timeout"), _) => {
                return wrong(format!("{key}: must be a time as a text, for example '10m'"));
            }
            ("save_after", _) => return wrong("save_after: must be a size as a text, for example '256M'"),
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
                "max_newcomers"
                | "newcomer_grace"
                | "connects_per_second"
                | "handshake_silence"
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
                    Some(within(key, &value, MAX_CONNECTIONS_RANGE).map_err(|why| (None, why))?);
            }
            ("metrics" | "metrics_open" | "metrics_forks", value) => {
                self.metrics.take(key, &value).map_err(|why| (None, why))?;
            }
            ("http" | "http_open", value) => {
                self.http.take(key, &value).map_err(|why| (None, why))?;
            }
            ("max_memory_in_flight", DeValue::String(text)) => {
                let bytes = memory_in_flight(&text);
                let bytes = bytes.map_err(|why| (None, format!("max_memory_in_flight={text}: {why}")))?;
                self.max_memory_in_flight = Some(bytes);
            }
            ("max_memory_in_flight", _) => {
                return wrong("max_memory_in_flight: must be a size as a text, for example '256M'");
            }
            ("device", DeValue::Array(list)) => {
                for (index, entry) in list.into_iter().enumerate() {
                    let span = entry.span();
                    let DeValue::Table(table) = entry.into_inner() else {
                        return Err((Some(span), "device: write [[device]]".into()));
                    };
                    let device = device(lines, index + 1, table, &span);
                    self.devices.push(device.map_err(|(within, why)| (within.or(Some(span)), why))?);
                }
            }
            ("device", _) => return wrong("device: write [[device]], with two brackets"),
            (other, _) => {
                let hint = nearest(other, &TOP_KEYS).map(|h| format!("; {h}?")).unwrap_or_default();
                let keys = TOP_KEYS.join(", ");
                return wrong(format!("unknown key {other:?}{hint}; the keys are {keys}"));
            }
        }
        Ok(())
    }
}

/// A text, or a list of texts. The error is a sentence.
fn texts(key: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.clone().into_owned()),
        _ => Err(format!("{key}: must be a text or a list of texts")),
    };
    match value {
        DeValue::Array(list) => list.iter().map(|entry| text(entry.get_ref())).collect(),
        value => Ok(vec![text(value)?]),
    }
}

fn of_key(key: &str, text: &str, why: &str) -> Wrong {
    (None, format!("{key}={text}: {why}"))
}

/// How often is saved.
///
/// # Errors
/// Half a sentence.
pub fn save_every(text: &str) -> Result<Duration, String> {
    let time = times::parse(text)?;
    if time < SAVE_EVERY_MIN { Err("at least 1s".into()) } else { Ok(time) }
}

/// After how many changed bytes is saved.
///
/// # Errors
/// Half a sentence.
pub fn save_after(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    if bytes < SAVE_AFTER_MIN_BYTES { Err("at least 1M".into()) } else { Ok(bytes) }
}

/// Reads the bytes that connections may hold for requests.
///
/// # Errors
/// Half a sentence that follows the text.
pub fn memory_in_flight(text: &str) -> Result<u64, String> {
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
) -> Result<DeviceWords, Wrong> {
    let at = |(key, _): (&Spanned<DeString<'_>>, _)| (key.get_ref().to_string(), lines.of(&key.span()));
    let key_lines = table.iter().map(at).collect();
    let mut text = |key: &str| match table.remove(key).map(|value| (value.span(), value.into_inner())) {
        Some((_, DeValue::String(text))) => Ok(text.into_owned()),
        Some((span, _)) => Err((Some(span), format!("device {number}: {key}: must be a text"))),
        None => wrong(format!("device {number}: {key} is missing")),
    };
    let entries = Entries::new(&text("name")?, &text("kind")?).map_err(|e| (None, e.to_string()))?;
    let line = lines.of(span);
    let mut device = DeviceWords { entries, exports: Vec::new(), count: None, line, lines: key_lines };
    for (key, value) in table {
        let span = key.span();
        device
            .take(lines, key.get_ref(), value.into_inner())
            .map_err(|(within, why)| (within.or(Some(span)), why))?;
    }
    if device.entries.name.contains(NUMBER) && device.count.is_none() {
        return wrong(format!("{}: {NUMBER} is for count", device.entries.name));
    }
    Ok(device)
}

impl DeviceWords {
    fn take(&mut self, lines: &Lines<'_>, key: &DeString<'_>, value: DeValue<'_>) -> Result<(), Wrong> {
        let name = self.entries.name.clone();
        let value = match (key.as_ref(), value) {
            ("count", value) => {
                let number = integer(&value).and_then(|number| usize::try_from(number).ok());
                let Some(count @ 1..=MAX_DEVICES) = number else {
                    return wrong(format!("{name}: count: must be a number from 1 to {MAX_DEVICES}"));
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
            ("export", _) => return wrong(format!("{name}: {EXPORT_FORM}")),
            (_, DeValue::String(text)) => text.into_owned(),
            (_, DeValue::Boolean(yes)) => if yes { "yes" } else { "no" }.into(),
            // Where a size is meant, a number is refused later, with the same words as on the
            // command line.
            (key, value @ DeValue::Integer(_)) => match integer(&value) {
                Some(number) => number.to_string(),
                None => return wrong(format!("{name}: {key}: the number is too large")),
            },
            (key, other) => {
                let is = other.type_str();
                return wrong(format!("{name}: {key}: must be a text, a number or a boolean, not {is}"));
            }
        };
        self.entries.add(key, &value).map_err(|e| (None, e.to_string()))
    }

    fn export(
        &mut self,
        lines: &Lines<'_>,
        table: DeTable<'_>,
        span: Option<Range<usize>>,
    ) -> Result<(), Wrong> {
        let name = &self.entries.name;
        let mut export = ExportWords {
            line: span.as_ref().map_or(self.line, |span| lines.of(span)),
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
                    let said = texts("allow", value);
                    export.allow = Some(said.map_err(|why| (at, format!("{name}: export: {why}")))?);
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
                    let taken = limits::of_toml(&mut export.limits, key, value);
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
