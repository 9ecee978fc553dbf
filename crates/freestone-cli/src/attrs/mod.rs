//! The attributes of devices under the kernel's names: what they are, and which can be set to what.

mod ram;

use freestone::codec::Algorithm;
use serde_json::{Map, Value, json};

use self::ram::Change;
pub use self::ram::{auto_recompressed, backing, bd_stat, io_stat, mm_stat};
use crate::control::protocol::{Errno, Fault};
use crate::entries::nearest;
use crate::registry::{Entry, Kind};
use crate::spec::KindSpec;

const NULL_ATTRS: [&str; 2] = ["size", "blocksize"];
const FILE_ATTRS: [&str; 4] = ["path", "readonly", "direct", "size"];

/// The names of a device's attributes.
pub fn names(entry: &Entry) -> &'static [&'static str] {
    match entry.kind {
        Kind::Ram(_) => &ram::NAMES,
        Kind::Null(_) => &NULL_ATTRS,
        Kind::File(_) => &FILE_ATTRS,
    }
}

/// The value of one attribute. Sizes are numbers of bytes.
pub fn get(entry: &Entry, attr: &str) -> Result<Value, Fault> {
    let value = match (&entry.kind, &entry.spec.kind) {
        (Kind::Ram(ram), _) => ram::value(ram, attr),
        (_, KindSpec::Null { blocksize, .. }) if attr == "blocksize" => Some(json!(blocksize)),
        (Kind::File(file), _) if attr == "path" => Some(json!(file.path().to_string_lossy())),
        (Kind::File(file), _) if attr == "direct" => Some(json!(if file.is_direct() { "on" } else { "off" })),
        (Kind::File(_), _) if attr == "readonly" => Some(json!(entry.device().geometry().read_only)),
        _ if attr == "size" => Some(json!(entry.device().geometry().size)),
        _ => None,
    };
    value.ok_or_else(|| unknown(entry, attr))
}

/// A value as sysfs shows it: statistics are a row of numbers, secondary algorithms a line each with all that could be
/// chosen.
pub fn plain(attr: &str, value: &Value) -> String {
    match value {
        Value::Object(chosen) if attr == "recomp_algorithm" => {
            let line = |(priority, chosen): (&String, &Value)| {
                let all = Algorithm::ALL.map(|algorithm| match algorithm.name() {
                    name if chosen == name => format!("[{name}]"),
                    name => name.to_owned(),
                });
                format!("#{priority}: {}", all.join(" "))
            };
            chosen.iter().map(line).collect::<Vec<_>>().join("\n")
        }
        Value::String(text) => text.clone(),
        Value::Object(columns) => columns.values().map(|v| plain("", v)).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// Checks every attribute, then sets them; after a refusal nothing has changed.
pub fn set(entry: &Entry, wanted: &Map<String, Value>) -> Result<(), Fault> {
    let mut changes = Vec::new();
    for (attr, value) in wanted {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => return Err(Fault::invalid(format!("{}: {attr}: must be a text or a number", entry.name()))),
        };
        changes.push((check(entry, attr, &text)?, attr, text));
    }
    changes.sort_unstable_by_key(|(change, ..)| *change);
    let Kind::Ram(ram) = &entry.kind else { return Ok(()) };
    for (change, attr, text) in changes {
        let made = change.make(ram);
        made.map_err(|e| Fault::failed(Errno::EINVAL, format!("{}: {attr}={text}: {e}", entry.name())))?;
    }
    Ok(())
}

fn check(entry: &Entry, attr: &str, text: &str) -> Result<Change, Fault> {
    match &entry.kind {
        Kind::Ram(ram) => Change::check(ram, entry.name(), attr, text).ok_or_else(|| unknown(entry, attr))?,
        _ if names(entry).contains(&attr) => {
            let why = format!("fixed for the life of a {} device", entry.kind_name());
            Err(Fault::failed(Errno::EBUSY, format!("{}: {attr}={text}: {why}", entry.name())))
        }
        _ => Err(unknown(entry, attr)),
    }
}

fn unknown(entry: &Entry, attr: &str) -> Fault {
    let (name, names) = (entry.name(), names(entry));
    // In the kernel these are files to write to.
    let words = match attr {
        "compact" | "reset" => Some(""),
        "idle" => Some(" all"),
        "writeback" => Some(" idle"),
        "recompress" => Some(" type=idle"),
        _ => None,
    };
    if let Some(words) = words {
        return Fault::invalid(format!("{name}: {attr} is a verb here: freestone {attr} {name}{words}"));
    }
    let hint = nearest(attr, names).map(|h| format!("; {h}?")).unwrap_or_default();
    let (kind, all) = (entry.kind_name(), names.join(", "));
    Fault::invalid(format!(
        "{name}: unknown attribute {attr:?}{hint}; the attributes of a {kind} device are {all}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{get, names, set};
    use crate::registry::Entry;

    fn entry(text: &str) -> Entry {
        Entry::build(text.parse().unwrap()).unwrap()
    }

    fn wanted(pairs: &[(&str, &str)]) -> Map<String, Value> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect()
    }

    #[test]
    fn every_name_has_a_value() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 8192]).unwrap();
        let file = format!("f=file,path={},direct=off", image.display());
        for text in ["r=ram,disksize=1M,mem_limit=none", "n=null,size=1M,blocksize=512", &file] {
            let entry = entry(text);
            for attr in names(&entry) {
                get(&entry, attr).unwrap();
            }
            assert!(get(&entry, "nonsense").is_err());
        }
        assert_eq!(get(&entry("r=ram,disksize=1M"), "disksize"), Ok(json!(1 << 20)));
        assert_eq!(get(&entry("n=null,size=1M,blocksize=512"), "blocksize"), Ok(json!(512)));
        assert_eq!(get(&entry(&file), "size"), Ok(json!(8192)));
        assert_eq!(get(&entry(&file), "direct"), Ok(json!("off")));
    }

    #[test]
    fn what_can_be_set_is_set() {
        let entry = entry("r=ram,disksize=1M,mem_limit=1M");
        set(&entry, &wanted(&[("mem_limit", "8M"), ("disksize", "2M"), ("mem_used_max", "0")])).unwrap();
        assert_eq!(get(&entry, "disksize"), Ok(json!(2 << 20)));
        assert_eq!(get(&entry, "mem_limit"), Ok(json!(8 << 20)));
        set(&entry, &wanted(&[("mem_limit", "none")])).unwrap();
        assert_eq!(get(&entry, "mem_limit"), Ok(json!(0)));
    }

    #[test]
    fn refusals_change_nothing() {
        let ram = entry("r=ram,disksize=1M,mem_limit=1M");
        let fixed = "fixed once the device is initialised; create a new device with another value";
        let settable = "read-only; disksize (grow), mem_limit, mem_used_max (0), writeback_limit, \
                        writeback_limit_enable and writeback_batch_size can be set";
        for (attr, value, code, sentence) in [
            ("disksize", "512K", -32000, "smaller than the present 1M; a device only grows"),
            ("disksize", "16777215T", -32602, "too large; a ram device has at most 256T"),
            ("disksize", "12", -32602, "give a unit; 12M? (K, M, G and T are known, 1024-based)"),
            ("mem_used_max", "1", -32602, "only 0 can be set, which starts the maximum anew"),
            ("comp_algorithm", "zstd", -32000, fixed),
            ("algorithm_params", "level=3", -32000, fixed),
            ("mm_stat", "0", -32602, settable),
            ("backing_dev", "/a", -32000, fixed),
            ("writeback_limit", "1", -32000, "the device has no backing_dev; create it with one"),
        ] {
            let fault = set(&ram, &wanted(&[("mem_limit", "8M"), (attr, value)])).unwrap_err();
            assert_eq!((fault.code, fault.message), (code, format!("r: {attr}={value}: {sentence}")));
            assert_eq!(get(&ram, "mem_limit"), Ok(json!(1 << 20)));
        }
        let message = |entry: &Entry, attr: &str| set(entry, &wanted(&[(attr, "1")])).unwrap_err().message;
        assert_eq!(message(&ram, "compact"), "r: compact is a verb here: freestone compact r");
        assert!(message(&ram, "memlimit").starts_with("r: unknown attribute \"memlimit\"; mem_limit?; "));
        let null = entry("n=null,size=1M");
        assert_eq!(message(&null, "size"), "n: size=1: fixed for the life of a null device");
        assert_eq!(
            message(&null, "disksize"),
            "n: unknown attribute \"disksize\"; the attributes of a null device are size, blocksize"
        );
    }
}
