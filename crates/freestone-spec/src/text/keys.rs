//! Access to the keys of a device specification, and parsers for values that several kinds of
//! devices use.

use std::path::PathBuf;

use freestone::codec::{Algorithm, ParamsError};
use freestone::null::MAX_SIZE_BYTES;
use freestone::ram::DISKSIZE_BYTES_MAX;

use crate::entries::{Entries, SpecError, nearest};
use crate::schema::{self, Key};
use crate::size::{self, SizeError};
use crate::{limits, path_text};

/// Size of a sector in bytes, the unit of counts in the kernel's interfaces.
pub const SECTOR_BYTES: u64 = 512;
const _: () = assert!(MAX_SIZE_BYTES == i64::MAX as u64, "what a file has at most too, says parse_length");

/// Keys of a device specification, from which kinds and layers read the values that they need.
pub(crate) struct Keys(pub Entries);

impl Keys {
    /// Checks that the kind has all keys of the specification.
    pub(crate) fn check_names(&self) -> Result<(), SpecError> {
        let Entries { name, kind, pairs } = &self.0;
        let is_unknown = |(key, _): &&(String, _)| schema::of_kind(kind).all(|known| known.name != key);
        let Some((key, _)) = pairs.iter().find(is_unknown) else { return Ok(()) };
        let of_all: &[&str] = if schema::is_verb(kind) { &[] } else { &limits::KEYS };
        let allowed: Vec<_> = schema::of_kind(kind).map(|key| key.name).collect();
        let hint = nearest(key, &allowed).or_else(|| nearest(key, of_all));
        Err(SpecError::Key {
            name: name.clone(),
            kind: kind.clone(),
            key: key.clone(),
            hint,
            allowed: allowed.into(),
            of_all,
        })
    }

    /// Returns the first of the keys that is set.
    pub(crate) fn first_of(&self, keys: &[Key]) -> Option<&'static str> {
        keys.iter().map(|key| key.name).find(|key| self.typed(key).is_some())
    }

    /// Checks that a writable device has no keys of the family of its forks. `readonly` are the keys that make it
    /// read-only, and `noun` names the device.
    pub(crate) fn check_base(&self, is_base: bool, readonly: &str, noun: &str) -> Result<(), SpecError> {
        match self.first_of(schema::FAMILY).filter(|_| !is_base) {
            Some(key) => {
                Err(self.refuse(key, format!("only with {readonly}; it is for the forks of the {noun}")))
            }
            None => Ok(()),
        }
    }

    /// Parses the value of a key with `parse`. Returns `None` if the key is not set.
    pub(crate) fn take<T>(
        &self,
        key: &str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, SpecError> {
        let Some(value) = self.typed(key) else { return Ok(None) };
        parse(value).map(Some).map_err(|why| self.value_error(key, value, why))
    }

    /// Parses the value of a required key. If the key is missing, the error message contains
    /// `example`.
    pub(crate) fn need<T>(
        &self,
        key: &'static str,
        example: &'static str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        let missing =
            || SpecError::Missing { name: self.0.name.clone(), kind: self.0.kind.clone(), key, example };
        self.take(key, parse)?.ok_or_else(missing)
    }

    /// Returns the value of a key as it was typed, or `None` if the key is not set.
    pub(crate) fn typed(&self, key: &str) -> Option<&str> {
        self.0.pairs.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    fn value_error(&self, key: &str, value: &str, why: String) -> SpecError {
        SpecError::Value { name: self.0.name.clone(), key: key.into(), value: value.into(), why }
    }

    /// Returns an error that refuses the value of a key for the reason `why`.
    pub(crate) fn refuse(&self, key: &str, why: impl Into<String>) -> SpecError {
        self.value_error(key, self.typed(key).unwrap_or_default(), why.into())
    }

    pub(crate) fn params_error(&self, why: String) -> SpecError {
        SpecError::Params { name: self.0.name.clone(), why }
    }
}

/// Parses the size of a RAM disk, such as `4G`, and returns it in bytes.
pub(crate) fn parse_disksize(text: &str) -> Result<u64, String> {
    let max = size::exact(DISKSIZE_BYTES_MAX);
    parse_size(text, DISKSIZE_BYTES_MAX, &format!("a ram device has at most {max}"))
}

/// Parses the size of a null device or a file, such as `4G`, and returns it in bytes. The size is
/// limited by signed 64-bit offsets.
pub(crate) fn parse_length(text: &str) -> Result<u64, String> {
    parse_size(text, MAX_SIZE_BYTES, "the size must be less than 8388608T (2^63 bytes)")
}

fn parse_size(text: &str, max: u64, allowed: &str) -> Result<u64, String> {
    match size::parse(text) {
        Ok(bytes) if bytes <= max => Ok(bytes),
        Ok(_) | Err(SizeError::Overflow) => Err(format!("too large; {allowed}")),
        Err(e) => Err(e.to_string()),
    }
}

/// Parses a memory limit: a size with a unit, or `0` or `none` for unlimited (returns 0).
pub(crate) fn parse_limit(text: &str) -> Result<u64, String> {
    match text {
        "0" | "none" => Ok(0),
        _ => size::parse(text).map_err(|e| format!("{e}; 0 or none is no limit")),
    }
}

/// Parses the name of a compression algorithm.
pub fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse().map_err(|e| {
        if let ParamsError::LzoRle = e {
            return e.to_string();
        }
        let names = Algorithm::ALL.map(|a| a.to_string());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hint = nearest(text, &names).map(|h| format!("; {h}?")).unwrap_or_default();
        format!("unknown algorithm{hint}; allowed are {}", names.join(", "))
    })
}

pub(crate) fn parse_path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("a path is missing".into()) } else { Ok(path_text::path(text)) }
}

/// Parses a boolean: `yes`, `on`, `true` or `1`, or their opposites.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "on" | "true" | "1" => Ok(true),
        "no" | "off" | "false" | "0" => Ok(false),
        _ => Err("must be yes or no".into()),
    }
}

/// Parses a number of sectors. A size with a unit is refused.
pub(crate) fn parse_sectors(text: &str) -> Result<u64, String> {
    match (text.parse::<u32>(), size::parse(text)) {
        (Ok(sectors), _) => Ok(u64::from(sectors)),
        (_, Ok(bytes)) => Err(format!(
            "a count of {SECTOR_BYTES}-byte sectors, without a letter; {}?",
            bytes.div_ceil(SECTOR_BYTES)
        )),
        _ => Err(format!("must be a whole number: a count of {SECTOR_BYTES}-byte sectors")),
    }
}
