//! Opening of a state directory whose topology file has arbitrary content.
//!
//! An input is one byte of options, then the file. If the options byte is odd, the check adds the correct
//! checksum to each line. Properties:
//! * A file that is refused is left unchanged, and the error is one sentence.
//! * A file that is accepted has the devices that the reference parser finds: those of committed changes, in
//!   their order, up to the first incomplete line. An incomplete line before the offset that a later line
//!   records as durable is refused.
//! * An accepted file is rewritten, and is the same when it is opened again, without unfinished changes.

use std::fs;

use freestone_state::{State, StateError};
use serde_json::Value;
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

/// Newest documented version of the topology file.
const VERSION: u64 = 3;

/// State directory of a server, for any number of consecutive checks.
pub struct States(TempDir);

impl States {
    /// Creates the directory, on `/dev/shm` if that exists.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self(directory.expect("a directory for states"))
    }

    /// Checks one input. Returns true if the file was accepted.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn check(&self, input: &[u8]) -> bool {
        let Some((options, text)) = input.split_first() else { return false };
        let content = if options & 1 == 1 { with_checksums(text) } else { text.to_vec() };
        let (dir, file) = (self.0.path(), self.0.path().join("topology"));
        fs::write(&file, &content).expect("the file is written");
        let expected = reference_devices(&content);
        let (state, unfinished) = match State::open(dir) {
            Ok(opened) => opened,
            Err(why) => {
                assert_eq!(why.to_string().lines().count(), 1, "{why}");
                assert_eq!(fs::read(&file).expect("it is there"), content, "a refused file is left alone");
                assert!(expected.is_none(), "{why}, but the reference parser has {expected:?}");
                return false;
            }
        };
        let devices = |state: &State| {
            let topology = state.topology();
            topology.devices().map(|device| (device.name.clone(), device.words.clone())).collect::<Vec<_>>()
        };
        let (expected, open) = expected.expect("the reference parser accepts it");
        assert_eq!(devices(&state), expected);
        assert_eq!(unfinished.len(), open);
        assert!(matches!(State::open(dir), Err(StateError::InUse(_))));
        let change = state.begin("create", &["another"]).expect("it goes on");
        change.commit().expect("also to its end");
        drop(state);
        let (reopened, unfinished) = State::open(dir).expect("what was written is read");
        assert_eq!((devices(&reopened), unfinished.len()), (expected, 0));
        true
    }
}

/// Adds the correct checksum to the beginning of each line.
fn with_checksums(text: &[u8]) -> Vec<u8> {
    let mut with_checksums = Vec::new();
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let json = line.strip_suffix(b"\n").unwrap_or(line);
        with_checksums.extend(format!("{:016x} ", xxh3_64(json)).bytes());
        with_checksums.extend(line);
    }
    with_checksums
}

/// Reference parser: returns the devices with their words, and the number of unfinished changes; or None if
/// the file must be refused.
fn reference_devices(content: &[u8]) -> Option<(Vec<(String, String)>, usize)> {
    let mut lines = Vec::new();
    let mut at = 0;
    for line in content.split_inclusive(|byte| *byte == b'\n') {
        lines.push((at, parse_line(line)));
        at += line.len() as u64;
    }
    let Some((_, first)) = lines.first() else { return Some((Vec::new(), 0)) };
    let first = first.as_ref().filter(|first| keys(first) == ["format", "version"])?;
    let version = first["version"].as_u64().filter(|version| u32::try_from(*version).is_ok())?;
    if first["format"].as_str()? != "freestone state" || version > VERSION {
        return None;
    }
    let whole = lines.iter().position(|(_, line)| line.is_none()).unwrap_or(lines.len());
    if let Some((end, _)) = lines.get(whole) {
        let begins = lines[whole..].iter().filter_map(|(_, line)| line.as_ref());
        let durable = begins.filter_map(|line| line.get("begin").and(line["synced"].as_u64()));
        if durable.max().is_some_and(|durable| durable > *end) {
            return None;
        }
    }
    let mut devices: Vec<(String, String, String)> = Vec::new();
    let mut open: Vec<(u64, Vec<&Value>)> = Vec::new();
    for (_, line) in &lines[1..whole.max(1)] {
        let line = line.as_ref()?;
        let number = ["begin", "put", "gone", "end"].iter().find_map(|key| line.get(*key))?.as_u64()?;
        let place = open.iter().position(|(change, _)| *change == number);
        if line.get("begin").is_some() {
            if place.is_some() {
                return None;
            }
            open.push((number, Vec::new()));
            continue;
        }
        if line.get("end").is_none() {
            open[place?].1.push(line);
            continue;
        }
        let (_, lines) = open.remove(place?);
        for gone in lines.iter().filter_map(|line| line.get("name")) {
            devices.retain(|(name, ..)| *name != *gone);
        }
        for device in lines.iter().filter_map(|line| line.get("device")) {
            let text = |key: &str| device[key].as_str().unwrap_or_default().to_owned();
            let (name, uuid, words) = (text("name"), text("uuid"), text("words"));
            if let Some(known) = devices.iter_mut().find(|(other, is, _)| *other == name && *is == uuid) {
                known.2 = words;
                continue;
            }
            devices.retain(|(other, ..)| *other != name);
            devices.push((name, uuid, words));
        }
    }
    Some((devices.into_iter().map(|(name, _, words)| (name, words)).collect(), open.len()))
}

/// Parses a line of the topology file. Returns None if the line is incomplete, has a wrong checksum or has an
/// unknown form.
fn parse_line(line: &[u8]) -> Option<Value> {
    let line = line.strip_suffix(b"\n")?;
    let (sum, json) = line.split_at_checked(17)?;
    let sum = std::str::from_utf8(sum).ok()?.strip_suffix(' ')?;
    if u64::from_str_radix(sum, 16).ok()? != xxh3_64(json) {
        return None;
    }
    let value: Value = serde_json::from_slice(json).ok()?;
    let number = |key: &str| value.get(key).is_some_and(Value::is_u64);
    let text = |of: &Value, key: &str| of.get(key).is_some_and(Value::is_string);
    let fits = match keys(&value).as_slice() {
        ["format", "version"] => {
            text(&value, "format")
                && value["version"].as_u64().is_some_and(|version| u32::try_from(version).is_ok())
        }
        ["begin", "names", "synced", "verb"] => {
            let names = value["names"].as_array();
            number("begin")
                && number("synced")
                && text(&value, "verb")
                && names.is_some_and(|names| names.iter().all(Value::is_string))
        }
        ["device", "put"] => number("put") && is_device(&value["device"]),
        ["gone", "name"] => number("gone") && text(&value, "name"),
        ["end"] => number("end"),
        _ => false,
    };
    fits.then_some(value)
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    keys.sort_unstable();
    keys
}

fn is_device(device: &Value) -> bool {
    let known = |(key, value): (&String, &Value)| match key.as_str() {
        "name" | "uuid" | "words" => value.is_string(),
        "generation" => value.is_u64(),
        "saved" => value.is_u64() || value.is_null(),
        "withheld" | "declared" | "home" => value.is_boolean(),
        "default_at" | "base" => value.as_array().is_some_and(|places| places.iter().all(Value::is_string)),
        "exports" => value.as_array().is_some_and(|exports| exports.iter().all(is_export)),
        _ => false,
    };
    let Some(fields) = device.as_object() else { return false };
    ["name", "uuid", "words"].iter().all(|key| fields.contains_key(*key)) && fields.iter().all(known)
}

fn is_export(export: &Value) -> bool {
    let known = |(key, value): (&String, &Value)| match key.as_str() {
        "nbd" | "vhost_user" => value.is_string() || value.is_null(),
        "ublk" => value.is_null() || value.as_u64().is_some_and(|queues| u16::try_from(queues).is_ok()),
        "read_only" | "declared" => value.is_boolean(),
        _ => false,
    };
    export.as_object().is_some_and(|fields| fields.iter().all(known))
}
