//! Syntax of a device specification: `NAME=KIND[,key=value]...`. A comma in a value is written
//! twice. The module [`kinds`](crate::kinds) checks the keys and their values.

use std::fmt;
use std::path::Path;

use freestone_nbd_client::{ServerAddress, Uri};
use thiserror::Error;

use crate::aliases;
use crate::{path_text, schema};

/// Maximum length of a device name in bytes. All NBD clients accept export names of this length.
const MAX_NAME_BYTES: usize = 255;

/// Prefix of a device name in the value of a key that otherwise contains the path of a file.
pub(crate) const DEVICE: &str = "device:";

/// Errors in a device specification. Each message is one sentence that names the device and the
/// key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    /// The text does not have the form `NAME=KIND[,key=value]...`.
    #[error("{0:?}: a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G")]
    Form(String),
    /// The name of the device is invalid: see [`check_name`].
    #[error(
        "{0:?}: a device name is 1 to {MAX_NAME_BYTES} bytes of printable characters without '=', ',' or blanks, and '/' only between others"
    )]
    Name(String),
    /// The kind of the device is unknown.
    #[error("{name}: unknown kind {kind:?}{}; the kinds are {}", suggestion(*.hint), .kinds.join(", "))]
    Kind {
        /// Name of the device.
        name: String,
        /// Unknown kind, as it was typed.
        kind: String,
        /// Most similar known kind, if one is similar enough.
        hint: Option<&'static str>,
        /// Names of all kinds.
        kinds: &'static [&'static str],
    },
    /// Devices of this kind have no such key.
    #[error("{name}: unknown key {key:?}{}; the keys of {} are {}{}", suggestion(*.hint), key_owner(.kind), .allowed.join(", "), common_keys(.of_all))]
    Key {
        /// Name of the device.
        name: String,
        /// Kind of the device.
        kind: String,
        /// Unknown key, as it was typed.
        key: String,
        /// Most similar known key, if one is similar enough.
        hint: Option<&'static str>,
        /// Keys of devices of this kind.
        allowed: Box<[&'static str]>,
        /// Keys that devices of every kind have.
        of_all: &'static [&'static str],
    },
    /// A key is not followed by `=` and a value.
    #[error("{name}: {key}: a value is missing; write {key}=VALUE")]
    NoValue {
        /// Name of the device.
        name: String,
        /// Key without a value.
        key: String,
    },
    /// A key is given twice.
    #[error("{name}: {key}: given twice")]
    Twice {
        /// Name of the device.
        name: String,
        /// Key that is given twice.
        key: String,
    },
    /// A required key is missing.
    #[error("{name}: {key} is missing; {} device needs it, for example {example}", with_article(.kind))]
    Missing {
        /// Name of the device.
        name: String,
        /// Kind of the device.
        kind: String,
        /// Missing key.
        key: &'static str,
        /// Missing key with an example value.
        example: &'static str,
    },
    /// A word of `algorithm_params` is invalid.
    #[error("{name}: algorithm_params: {why}")]
    Params {
        /// Name of the device.
        name: String,
        /// Invalid word, the reason, and the allowed values.
        why: String,
    },
    /// The value of a key is invalid.
    #[error("{name}: {key}={value}: {why}")]
    Value {
        /// Name of the device.
        name: String,
        /// Key with the invalid value.
        key: String,
        /// Invalid value, as it was typed.
        value: String,
        /// Reason why the value is invalid, and the allowed values.
        why: String,
    },
}

impl SpecError {
    /// Returns the key that the error is about, or `None` if the error is not about the value of
    /// one key.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Key { key, .. }
            | Self::NoValue { key, .. }
            | Self::Twice { key, .. }
            | Self::Value { key, .. } => Some(key),
            Self::Kind { .. } => Some("kind"),
            Self::Params { .. } => Some("algorithm_params"),
            Self::Form(_) | Self::Name(_) | Self::Missing { .. } => None,
        }
    }
}

fn suggestion(hint: Option<&'static str>) -> String {
    hint.map(|h| format!("; {h}?")).unwrap_or_default()
}

/// Parsed device specification: name, kind, keys and values as they were typed. Keys are unique and
/// have their present names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entries {
    /// Name of the device. Always valid.
    pub name: String,
    /// Kind of the device, not checked yet.
    pub kind: String,
    /// Pairs of key and value, not checked yet.
    pub pairs: Vec<(String, String)>,
}

impl Entries {
    /// Parses a specification of the form `NAME=KIND[,key=value]...`.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        Self::parse_with(text, Self::add)
    }

    /// Parses a specification that a user wrote. Logs a warning for each key with a former name.
    pub fn parse_with_warnings(text: &str) -> Result<Self, SpecError> {
        Self::parse_with(text, Self::add_with_warning)
    }

    fn parse_with(
        text: &str,
        add: fn(&mut Self, &str, &str) -> Result<(), SpecError>,
    ) -> Result<Self, SpecError> {
        let mut parts = split_commas(text).into_iter();
        let first = parts.next().unwrap_or_default();
        let (name, kind) = first.split_once('=').ok_or_else(|| SpecError::Form(text.into()))?;
        let mut entries = Self::new(name, kind)?;
        for part in parts {
            match part.split_once('=') {
                Some((key, value)) => add(&mut entries, key, value)?,
                None => return Err(SpecError::NoValue { name: name.into(), key: part }),
            }
        }
        Ok(entries)
    }

    /// Creates a specification without keys. Fails if the name is invalid.
    pub fn new(name: &str, kind: &str) -> Result<Self, SpecError> {
        check_name(name)?;
        Ok(Self { name: name.into(), kind: kind.into(), pairs: Vec::new() })
    }

    /// Adds a key with its value. A former name of a key is replaced by the present one. Fails if
    /// the key already exists.
    pub fn add(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        let key = aliases::canonical_device_key(key);
        if self.pairs.iter().any(|(k, _)| k == key) {
            return Err(SpecError::Twice { name: self.name.clone(), key: key.into() });
        }
        self.pairs.push((key.into(), value.into()));
        Ok(())
    }

    /// Adds a key that a user wrote. Logs a warning if it has a former name.
    pub fn add_with_warning(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        self.add(aliases::canonical_user_key(key), value)
    }

    /// Sets the value of a key, and adds the key if it does not exist.
    pub fn put(&mut self, key: &str, value: &str) {
        match self.pairs.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => value.clone_into(old),
            None => self.pairs.push((key.into(), value.into())),
        }
    }

    /// Replaces relative paths in the values by absolute ones that start at the directory `base`.
    #[must_use]
    pub fn with_base(mut self, base: &Path) -> Self {
        for (key, value) in &mut self.pairs {
            match key.as_str() {
                // Values that are names of devices, not paths.
                "cow" if !value.contains('/') => {}
                "backing_dev" if value.starts_with(DEVICE) => {}
                // `none` is a keyword, not a directory.
                "cache" if value == "none" => {}
                key if schema::is_path(key) && !value.is_empty() => {
                    *value = path_text::text(&base.join(path_text::path(value)));
                }
                // An invalid URI stays as it was typed, and is refused later.
                "uri" => {
                    if let Ok(uri) = value.parse::<Uri>()
                        && matches!(&uri.address, ServerAddress::Unix(path) if path.is_relative())
                    {
                        *value = uri.absolute(base).to_string();
                    }
                }
                "algorithm_params" => {
                    let based = |word: &str| match word.strip_prefix("dict=") {
                        Some(path) if !path.is_empty() => {
                            format!("dict={}", path_text::text(&base.join(path_text::path(path))))
                        }
                        _ => word.to_owned(),
                    };
                    // The value contains one group of words per algorithm, separated by semicolons.
                    let group = |group: &str| {
                        group.split(char::is_whitespace).map(based).collect::<Vec<_>>().join(" ")
                    };
                    *value = value.split(';').map(group).collect::<Vec<_>>().join(";");
                }
                _ => {}
            }
        }
        self
    }
}

impl fmt::Display for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.kind.replace(',', ",,"))?;
        self.pairs.iter().try_for_each(|(key, value)| {
            write!(f, ",{}={}", key.replace(',', ",,"), value.replace(',', ",,"))
        })
    }
}

/// Splits a text at single commas. A double comma becomes one comma of the part.
fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

/// Checks the name of a device. A name with slashes must be a relative path in normal form: without
/// a slash at either end, double slashes, or parts `.` or `..`.
pub fn check_name(name: &str) -> Result<(), SpecError> {
    // `escape_debug` returns one character for a printable one. It escapes control characters and
    // invisible or directional marks as `\u{...}` or `\n`.
    let printable =
        |c: char| !c.is_whitespace() && (c == '\'' || c == '"' || c == '\\' || c.escape_debug().len() == 1);
    let bad = |c: char| !printable(c) || matches!(c, '=' | ',');
    let bad_part = |part: &str| part.is_empty() || (name.contains('/') && matches!(part, "." | ".."));
    if name.len() > MAX_NAME_BYTES || name.contains(bad) || name.split('/').any(bad_part) {
        return Err(SpecError::Name(name.into()));
    }
    Ok(())
}

/// Returns the candidate that is most similar to the word `typed`, or `None` if none is similar
/// enough.
pub fn nearest<'a>(typed: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let typed = typed.to_lowercase();
    let (distance, best) =
        candidates.iter().map(|c| (strsim::damerau_levenshtein(&typed, c), *c)).min_by_key(|(d, _)| *d)?;
    if distance <= best.len().div_ceil(3) && distance < best.len() {
        return Some(best);
    }
    // Otherwise `typed` may be a part of a name: `size` for `disksize`, `algorithm` for
    // `comp_algorithm`.
    candidates.iter().copied().find(|c| typed.len() > 2 && c.contains(&typed))
}

/// Returns the text that names the owner of keys in a message: a device of this kind, or a command.
fn key_owner(kind: &str) -> String {
    if schema::is_verb(kind) { kind.to_owned() } else { format!("{} device", with_article(kind)) }
}

/// Returns the text that lists the keys of every device in a message, or an empty text without such
/// keys.
fn common_keys(keys: &[&str]) -> String {
    if keys.is_empty() { String::new() } else { format!("; those of every device are {}", keys.join(", ")) }
}

/// Returns the name of a kind of device with its indefinite article, such as "an nbd".
pub fn with_article(kind: &str) -> String {
    // The article depends on the initial sound: "en" of nbd, "ar" of rbd.
    let article = if matches!(kind, "image" | "nbd" | "rbd") { "an" } else { "a" };
    format!("{article} {kind}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Entries, check_name, nearest};

    #[test]
    fn double_comma_parses_as_comma_of_value() {
        let entries = Entries::parse("f=file,path=a,,b,,,size=1G").unwrap();
        assert_eq!(entries.pairs, [("path".into(), "a,b,".into()), ("size".into(), "1G".into())]);
        assert_eq!(entries.to_string(), "f=file,path=a,,b,,,size=1G");
        assert_eq!(Entries::parse(&entries.to_string()), Ok(entries));
    }

    #[test]
    fn former_key_gets_its_present_name() {
        for parse in [Entries::parse, Entries::parse_with_warnings] {
            let entries = parse("r=ram,disksize=1M,on_lost=empty").unwrap();
            assert_eq!(entries.to_string(), "r=ram,disksize=1M,on_data_loss=empty");
            let both = parse("r=ram,on_lost=empty,on_data_loss=empty").unwrap_err();
            assert_eq!(both.to_string(), "r: on_data_loss: given twice");
        }
    }

    #[test]
    fn with_base_makes_paths_absolute() {
        let with_base = |text: &str| Entries::parse(text).unwrap().with_base(Path::new("/base")).to_string();
        assert_eq!(with_base("f=file,path=x.img"), "f=file,path=/base/x.img");
        assert_eq!(with_base("f=file,path=/x.img,size=1G"), "f=file,path=/x.img,size=1G");
        assert_eq!(with_base("f=file,path="), "f=file,path=");
        assert_eq!(with_base("n=nbd,uri=nbd://h/x,tls_ca=ca"), "n=nbd,uri=nbd://h/x,tls_ca=/base/ca");
        assert_eq!(with_base("n=nbd,uri=nbd+unix:///e?socket=s"), "n=nbd,uri=nbd+unix:///e?socket=/base/s");
        assert_eq!(with_base("s=snapshot,cow=./x.cow"), "s=snapshot,cow=/base/./x.cow");
        assert_eq!(with_base("s=snapshot,cow=x"), "s=snapshot,cow=x");
        assert_eq!(
            with_base("r=ram,algorithm_params=level=3 dict=d"),
            "r=ram,algorithm_params=level=3 dict=/base/d"
        );
        assert_eq!(with_base("r=ram,backing_dev=device:n"), "r=ram,backing_dev=device:n");
        assert_eq!(with_base("r=ram,backing_dev=./device:n"), "r=ram,backing_dev=/base/./device:n");
        // U+EFFF represents a byte that is not valid UTF-8.
        assert_eq!(
            with_base("r=ram,algorithm_params=dict=d\u{efff}"),
            "r=ram,algorithm_params=dict=/base/d\u{efff}"
        );
        assert_eq!(
            with_base("r=ram,backing_dev=spill,algorithm_params=dict=a; priority=1 dict=b;dict=/c"),
            "r=ram,backing_dev=/base/spill,algorithm_params=dict=/base/a; priority=1 dict=/base/b;dict=/c"
        );
    }

    #[test]
    fn device_name_is_a_relative_path() {
        let long = "x".repeat(256);
        for bad in [
            "",
            "a b",
            "a=b",
            "a,b",
            "/",
            "/a",
            "a/",
            "a//b",
            "./a",
            "a/../b",
            "a\n",
            "a\u{202e}b",
            "a\u{a0}",
            &long,
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "ram0", "a/b.c/d", "Größe", "a.b-c_d:e'\"\\*", &long[1..]] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn nearest_finds_similar_names_only() {
        let keys = ["disksize", "comp_algorithm", "mem_limit"];
        assert_eq!(nearest("disksiez", &keys), Some("disksize"));
        assert_eq!(nearest("MEM-LIMIT", &keys), Some("mem_limit"));
        assert_eq!(nearest("size", &keys), Some("disksize"));
        assert_eq!(nearest("algorithm", &keys), Some("comp_algorithm"));
        assert_eq!(nearest("zone_max_open", &keys), None);
        assert_eq!(nearest("", &keys), None);
    }
}
