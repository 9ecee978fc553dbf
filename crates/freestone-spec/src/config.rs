//! The file of `serve --config`: the same devices, keys and values as on the command line, as TOML.
//!
//! ```toml
//! nbd = ["unix:/run/freestone/nbd.sock"]
//! control = "/run/freestone/control.sock"
//!
//! [[device]]
//! name = "ram0"
//! kind = "ram"
//! disksize = "4G"
//! ```

use std::fs;
use std::io::{self, Read as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use freestone::budget;
use thiserror::Error;
use toml::{Table, Value};

use crate::entries::{Entries, nearest};
use crate::size;

/// More is not a list of devices; bounds what a mistyped path can make us read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// What `max_connections` can be.
pub const MAX_CONNECTIONS_RANGE: RangeInclusive<i64> = 1..=65_536;

const TOP_KEYS: [&str; 5] = ["nbd", "control", "max_connections", "max_memory_in_flight", "device"];

/// What the file says. Relative paths in it start at the directory of the file.
#[derive(Debug, Default, PartialEq)]
pub struct FileConfig {
    /// Devices in the order of the file, keys and values unchecked.
    pub devices: Vec<Entries>,
    /// NBD addresses, unchecked.
    pub nbd: Vec<String>,
    /// Where the control socket goes.
    pub control: Option<PathBuf>,
    /// Most NBD connections at one time.
    pub max_connections: Option<u32>,
    /// Most bytes that connections hold for requests.
    pub max_memory_in_flight: Option<u64>,
    /// The directory of the file.
    pub base: PathBuf,
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
    /// What is in it cannot be meant; the sentence names the file.
    #[error("{0}")]
    Content(String),
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
pub fn parse(text: &str) -> Result<FileConfig, String> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| {
        let before = text.get(..e.span().map_or(0, |span| span.start)).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        format!("line {line}: {}", e.message().replace('\n', ", "))
    })?;
    let mut config = FileConfig::default();
    for (key, value) in table {
        match (key.as_str(), value) {
            ("nbd", Value::String(address)) => config.nbd.push(address),
            ("nbd", Value::Array(list)) => {
                for entry in list {
                    match entry {
                        Value::String(address) => config.nbd.push(address),
                        _ => return Err("nbd: must be a text or a list of texts".into()),
                    }
                }
            }
            ("nbd", _) => return Err("nbd: must be a text or a list of texts".into()),
            ("control", Value::String(path)) => config.control = Some(path.into()),
            ("control", _) => return Err("control: must be a path as a text".into()),
            ("max_connections", value) => {
                let (min, max) = MAX_CONNECTIONS_RANGE.into_inner();
                let must = format!("must be a number from {min} to {max}");
                let Value::Integer(number) = value else {
                    return Err(format!("max_connections: {must}, not {}", value.type_str()));
                };
                let fits = u32::try_from(number).ok().filter(|_| MAX_CONNECTIONS_RANGE.contains(&number));
                let fits = fits.ok_or_else(|| format!("max_connections={number}: {must}"));
                config.max_connections = Some(fits?);
            }
            ("max_memory_in_flight", Value::String(text)) => {
                let bytes = memory_in_flight(&text);
                config.max_memory_in_flight =
                    Some(bytes.map_err(|why| format!("max_memory_in_flight={text}: {why}"))?);
            }
            ("max_memory_in_flight", _) => {
                return Err("max_memory_in_flight: must be a size as a text, for example '256M'".into());
            }
            ("device", Value::Array(list)) => {
                for (index, entry) in list.into_iter().enumerate() {
                    let Value::Table(table) = entry else { return Err("device: write [[device]]".into()) };
                    config.devices.push(device(index + 1, table)?);
                }
            }
            ("device", _) => return Err("device: write [[device]], with two brackets".into()),
            (other, _) => {
                let hint = nearest(other, &TOP_KEYS).map(|h| format!("; {h}?")).unwrap_or_default();
                return Err(format!("unknown key {other:?}{hint}; the keys are {}", TOP_KEYS.join(", ")));
            }
        }
    }
    Ok(config)
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

fn device(number: usize, mut table: Table) -> Result<Entries, String> {
    let mut text = |key: &str| match table.remove(key) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("device {number}: {key}: must be a text")),
        None => Err(format!("device {number}: {key} is missing")),
    };
    let mut entries = Entries::new(&text("name")?, &text("kind")?).map_err(|e| e.to_string())?;
    for (key, value) in table {
        let value = match value {
            Value::String(text) => text,
            Value::Boolean(yes) => if yes { "yes" } else { "no" }.into(),
            // Where a size is meant, a number is refused later, with the same words as on the
            // command line.
            Value::Integer(number) => number.to_string(),
            other => {
                let (name, is) = (&entries.name, other.type_str());
                return Err(format!("{name}: {key}: must be a text, a number or a boolean, not {is}"));
            }
        };
        entries.add(&key, &value).map_err(|e| e.to_string())?;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_file_is_read() {
        let config = parse(
            "nbd = ['unix:/a', 'tcp:127.0.0.1:0']\ncontrol = 'c'\nmax_connections = 65536\nmax_memory_in_flight = '1G'\n\
             [[device]]\nname = 'r'\nkind = 'ram'\ndisksize = '1G'\n\
             [[device]]\nname = 'f'\nkind = 'file'\npath = 'x,y'\nreadonly = true\nblocksize = 512\n",
        )
        .unwrap();
        assert_eq!(config.nbd, ["unix:/a", "tcp:127.0.0.1:0"]);
        assert_eq!((config.control, config.max_connections), (Some("c".into()), Some(65_536)));
        assert_eq!(config.max_memory_in_flight, Some(1 << 30));
        let devices: Vec<_> = config.devices.iter().map(ToString::to_string).collect();
        assert_eq!(devices, ["r=ram,disksize=1G", "f=file,path=x,,y,readonly=yes,blocksize=512"]);
        assert_eq!(parse("nbd = 'unix:/a'").unwrap().nbd, ["unix:/a"]);
    }

    #[test]
    fn refusals_name_line_or_key() {
        for (text, sentence) in [
            (
                "ndb = 'unix:/a'",
                "unknown key \"ndb\"; nbd?; the keys are nbd, control, max_connections, max_memory_in_flight, device",
            ),
            ("max_connections = 0", "max_connections=0: must be a number from 1 to 65536"),
            ("max_connections = 65537", "max_connections=65537: must be a number from 1 to 65536"),
            ("max_connections = '9'", "max_connections: must be a number from 1 to 65536, not string"),
            (
                "max_memory_in_flight = '1M'",
                "max_memory_in_flight=1M: must be at least 64M, twice the largest request",
            ),
            (
                "max_memory_in_flight = 5",
                "max_memory_in_flight: must be a size as a text, for example '256M'",
            ),
            ("nbd = 1", "nbd: must be a text or a list of texts"),
            ("nbd = [1]", "nbd: must be a text or a list of texts"),
            ("control = true", "control: must be a path as a text"),
            ("[device]\nname='r'", "device: write [[device]], with two brackets"),
            ("[[device]]\nkind='ram'", "device 1: name is missing"),
            ("[[device]]\nname='r'", "device 1: kind is missing"),
            ("[[device]]\nname=1\nkind='ram'", "device 1: name: must be a text"),
            (
                "[[device]]\nname='r'\nkind='ram'\ndisksize=1.5",
                "r: disksize: must be a text, a number or a boolean, not float",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), sentence, "{text}");
        }
        assert!(parse("nbd = 'a'\n\nnbd = 'b'\n").unwrap_err().starts_with("line 3: "));
        assert!(parse("nbd = [").unwrap_err().starts_with("line 1: "));
    }
}
