//! The attributes of devices under the kernel's names: what they are, and which can be set to what.

use freestone::ram::Ram;
use serde_json::{Map, Value, json};

use crate::control::protocol::{Errno, Fault};
use crate::entries::nearest;
use crate::registry::{Entry, Kind};
use crate::size;
use crate::spec::{KindSpec, parse_disksize, parse_limit};

const RAM_ATTRS: [&str; 8] = [
    "disksize",
    "initstate",
    "comp_algorithm",
    "algorithm_params",
    "mem_limit",
    "mem_used_max",
    "mm_stat",
    "io_stat",
];
const NULL_ATTRS: [&str; 2] = ["size", "blocksize"];
const FILE_ATTRS: [&str; 4] = ["path", "readonly", "direct", "size"];

/// Attributes that can be set, for the sentence that says so.
const RAM_SETTABLE: &str = "disksize (grow), mem_limit and mem_used_max (0) can be set";

/// The names of a device's attributes.
pub fn names(entry: &Entry) -> &'static [&'static str] {
    match entry.kind {
        Kind::Ram(_) => &RAM_ATTRS,
        Kind::Null(_) => &NULL_ATTRS,
        Kind::File(_) => &FILE_ATTRS,
    }
}

/// The value of one attribute. Sizes are numbers of bytes.
pub fn get(entry: &Entry, attr: &str) -> Result<Value, Fault> {
    let value = match (&entry.kind, &entry.spec.kind) {
        (Kind::Ram(ram), _) => ram_value(ram, attr),
        (_, KindSpec::Null { blocksize, .. }) if attr == "blocksize" => Some(json!(blocksize)),
        (Kind::File(file), _) if attr == "path" => Some(json!(file.path().to_string_lossy())),
        (Kind::File(file), _) if attr == "direct" => Some(json!(if file.is_direct() { "on" } else { "off" })),
        (Kind::File(_), _) if attr == "readonly" => Some(json!(entry.device().geometry().read_only)),
        _ if attr == "size" => Some(json!(entry.device().geometry().size)),
        _ => None,
    };
    value.ok_or_else(|| unknown(entry, attr))
}

fn ram_value(ram: &Ram, attr: &str) -> Option<Value> {
    Some(match attr {
        "disksize" => json!(ram.config().disksize),
        "initstate" => json!(1),
        "comp_algorithm" => json!(ram.config().comp_algorithm.to_string()),
        "algorithm_params" => json!(ram.config().algorithm_params.to_string()),
        "mem_limit" => json!(ram.config().mem_limit),
        "mem_used_max" => json!(ram.mm_stat().mem_used_max),
        "mm_stat" => mm_stat(ram),
        "io_stat" => io_stat(ram),
        _ => return None,
    })
}

/// The kernel's nine columns, in its order.
pub fn mm_stat(ram: &Ram) -> Value {
    let s = ram.mm_stat();
    json!({
        "orig_data_size": s.orig_data_size,
        "compr_data_size": s.compr_data_size,
        "mem_used_total": s.mem_used_total,
        "mem_limit": s.mem_limit,
        "mem_used_max": s.mem_used_max,
        "same_pages": s.same_pages,
        "pages_compacted": s.pages_compacted,
        "huge_pages": s.huge_pages,
        "huge_pages_since": s.huge_pages_since,
    })
}

/// The kernel's four columns, in its order.
pub fn io_stat(ram: &Ram) -> Value {
    let s = ram.io_stat();
    json!({
        "failed_reads": s.failed_reads,
        "failed_writes": s.failed_writes,
        "invalid_io": s.invalid_io,
        "notify_free": s.notify_free,
    })
}

/// What a `set` does to a RAM disk, once everything was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// `disksize`, in bytes. First in order: the only one that can still fail.
    Grow(u64),
    /// `mem_limit`, in bytes; 0 for none.
    MemLimit(u64),
    /// `mem_used_max=0`.
    ResetMemUsedMax,
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
        match change {
            Change::Grow(bytes) => ram
                .grow(bytes)
                .map_err(|e| Fault::failed(Errno::EINVAL, format!("{}: {attr}={text}: {e}", entry.name())))?,
            Change::MemLimit(bytes) => ram.set_mem_limit(bytes),
            Change::ResetMemUsedMax => ram.reset_mem_used_max(),
        }
    }
    Ok(())
}

fn check(entry: &Entry, attr: &str, text: &str) -> Result<Change, Fault> {
    let name = entry.name();
    let busy = |why: &str| Fault::failed(Errno::EBUSY, format!("{name}: {attr}={text}: {why}"));
    let invalid = |why: String| Fault::invalid(format!("{name}: {attr}={text}: {why}"));
    let Kind::Ram(ram) = &entry.kind else {
        return Err(if names(entry).contains(&attr) {
            busy(&format!("fixed for the life of a {} device", entry.kind_name()))
        } else {
            unknown(entry, attr)
        });
    };
    match attr {
        "disksize" => {
            let (new, old) = (parse_disksize(text).map_err(invalid)?, ram.config().disksize);
            if new < old {
                let why = format!("smaller than the present {}; a device only grows", size::exact(old));
                return Err(Fault::failed(Errno::EINVAL, format!("{name}: {attr}={text}: {why}")));
            }
            Ok(Change::Grow(new))
        }
        "mem_limit" => parse_limit(text).map(Change::MemLimit).map_err(invalid),
        "mem_used_max" if text == "0" => Ok(Change::ResetMemUsedMax),
        "mem_used_max" => Err(invalid("only 0 can be set, which starts the maximum anew".into())),
        "comp_algorithm" | "algorithm_params" => {
            Err(busy("fixed once the device is initialised; create a new device with another value"))
        }
        "initstate" | "mm_stat" | "io_stat" => Err(invalid(format!("read-only; {RAM_SETTABLE}"))),
        _ => Err(unknown(entry, attr)),
    }
}

fn unknown(entry: &Entry, attr: &str) -> Fault {
    let (name, names) = (entry.name(), names(entry));
    // In the kernel these are files to write to.
    if matches!(attr, "compact" | "reset") {
        return Fault::invalid(format!("{name}: {attr} is a verb here: freestone {attr} {name}"));
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
        let settable = "read-only; disksize (grow), mem_limit and mem_used_max (0) can be set";
        for (attr, value, code, sentence) in [
            ("disksize", "512K", -32000, "smaller than the present 1M; a device only grows"),
            ("disksize", "16777215T", -32602, "too large; a ram device has at most 256T"),
            ("disksize", "12", -32602, "give a unit; 12M? (K, M, G and T are known, 1024-based)"),
            ("mem_used_max", "1", -32602, "only 0 can be set, which starts the maximum anew"),
            ("comp_algorithm", "zstd", -32000, fixed),
            ("algorithm_params", "level=3", -32000, fixed),
            ("mm_stat", "0", -32602, settable),
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
