//! Parsing of block device options in JSON, which qemu accepts as a backing file name after
//! `json:`. libvirt and oVirt write such names. Only local files are supported: a format driver
//! (`raw`, `qcow2`) over a protocol driver (`file`, `host_device`), with nested objects or dotted
//! keys. Unknown options, such as `offset` of `raw`, may change the content, so a name with them is
//! refused.

use std::path::PathBuf;

use serde_json::{Map, Value};

/// Option keys that do not affect the content of the image.
const HARMLESS: [&str; 9] = [
    "aio",
    "auto-read-only",
    "cache",
    "detect-zeroes",
    "discard",
    "drop-cache",
    "locking",
    "node-name",
    "read-only",
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BackingName {
    pub path: PathBuf,
    /// Format of the file, if the options contain it.
    pub format: Option<String>,
}

/// Parses the options. Returns `None` unless they name a local file by an absolute path. A relative
/// path is refused, because qemu resolves it from its working directory.
pub(super) fn parse(text: &[u8]) -> Option<BackingName> {
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    let mut options = nested(serde_json::from_slice(&text[..end]).ok()?)?;
    let driver = take_text(&mut options, "driver").ok()?;
    let (file, format) = match options.remove("file") {
        Some(Value::Object(mut file)) => {
            let protocol = take_text(&mut file, "driver").ok()?;
            is_protocol(protocol.as_deref().unwrap_or("file")).then_some(())?;
            is_harmless(&options).then_some(())?;
            (file, driver)
        }
        // Without a format driver the file has raw content.
        None => {
            is_protocol(driver.as_deref()?).then_some(())?;
            (options, Some("raw".to_owned()))
        }
        // The value is the name of a block node of a qemu process, not a file.
        Some(_) => return None,
    };
    let mut file = file;
    let path = PathBuf::from(take_text(&mut file, "filename").ok()??);
    (path.is_absolute() && is_harmless(&file)).then_some(BackingName { path, format })
}

/// Converts dotted keys to objects: `file.driver` becomes `driver` of the object `file`. Only one
/// level is supported; returns `None` for contradictory keys.
fn nested(options: Map<String, Value>) -> Option<Map<String, Value>> {
    let mut nested = Map::new();
    for (key, value) in options {
        let (object, key) = match key.split_once('.') {
            Some((of, key)) => match nested.entry(of).or_insert_with(|| Value::Object(Map::new())) {
                Value::Object(object) => (object, key.to_owned()),
                _ => return None,
            },
            None => (&mut nested, key),
        };
        match (object.get_mut(&key), value) {
            (Some(Value::Object(before)), Value::Object(more)) => before.extend(more),
            (Some(_), _) => return None,
            (None, value) => drop(object.insert(key, value)),
        }
    }
    Some(nested)
}

/// Removes and returns the string option `key`; `None` if it is absent. The error is a value that
/// is not a string.
fn take_text(options: &mut Map<String, Value>, key: &str) -> Result<Option<String>, Value> {
    match options.remove(key) {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(other),
        None => Ok(None),
    }
}

fn is_protocol(driver: &str) -> bool {
    matches!(driver, "file" | "host_device")
}

fn is_harmless(options: &Map<String, Value>) -> bool {
    options.keys().all(|key| HARMLESS.contains(&key.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_backing_name_must_be_a_local_file() {
        let parse = |text: &str| parse(text.as_bytes()).map(|named| (named.path, named.format));
        let base = |format: Option<&str>| Some((PathBuf::from("/b"), format.map(str::to_owned)));
        let nested = r#"{"driver":"qcow2","file":{"driver":"file","filename":"/b"}}"#;
        assert_eq!(parse(nested), base(Some("qcow2")));
        assert_eq!(parse(&format!("{nested}\0\0")), base(Some("qcow2")), "padding");
        for (text, format) in [
            (r#"{"file.filename":"/b","driver":"raw","file.driver":"host_device"}"#, Some("raw")),
            (r#"{"file":{"filename":"/b"}}"#, None),
            (r#"{"driver":"file","filename":"/b","read-only":true}"#, Some("raw")),
            (r#"{"driver":"qcow2","node-name":"n","file":{"filename":"/b","locking":"off"}}"#, Some("qcow2")),
            (r#"{"driver":"qcow2","file":{"filename":"/b"},"file.driver":"file"}"#, Some("qcow2")),
        ] {
            assert_eq!(parse(text), base(format), "{text}");
        }
        for bad in [
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"b"}}"#,
            r#"{"driver":"nbd","host":"h"}"#,
            r#"{"driver":"qcow2","file":{"driver":"https","url":"https://h/b"}}"#,
            r#"{"driver":"raw","offset":512,"file":{"filename":"/b"}}"#,
            r#"{"driver":"qcow2","backing":null,"file":{"filename":"/b"}}"#,
            r#"{"driver":"qcow2","file":"node"}"#,
            r#"{"driver":"qcow2","file":{"filename":3}}"#,
            r#"{"driver":"qcow2","filename":"/b"}"#,
            r#"{"file.filename":"/b","file":3}"#,
            r#"{"filename":"/b"}"#,
            "[]",
            "{",
            "",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
