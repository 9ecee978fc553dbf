//! Attributes of devices: lists, reads, checks and sets them. Attributes have the names of the
//! kernel's drivers.

use std::sync::Arc;

use freestone::codec::Algorithm;
use serde_json::{Map, Value};

use crate::entries::{nearest, with_article};
use crate::family;
use crate::kinds::registry::Registry;
use crate::kinds::{Change, Entry};
use crate::limits::{self, LimitWords};
use crate::refusal::Refusal;
use crate::{layers, schema};

/// Returns the names of all attributes of a device.
pub fn names(entry: &Entry) -> Vec<&'static str> {
    [&entry.kind_attrs()[..], &entry.layers.names(), &limits::KEYS, entry.restart_keys()].concat()
}

/// Returns the value of an attribute of a device. Sizes are in bytes. Fails if the device has no
/// attribute with this name.
pub fn get(entry: &Entry, attr: &str) -> Result<Value, Refusal> {
    let layer_values = |entry: &Entry| {
        let top = entry.device()?;
        entry.layers.value(&entry.spec.layers, &**top, attr)
    };
    let value = match attr {
        _ if entry.layers.names().contains(&attr) => layer_values(entry),
        _ if entry.kind.attrs().contains(&attr) => entry.kind.value(entry, attr),
        _ if entry.shows_family() && family::NAMES.contains(&attr) => entry.family_value(attr),
        _ if limits::KEYS.contains(&attr) => entry.limits().value(attr).map(Value::from),
        _ if entry.restart_keys().contains(&attr) => entry.restart_policy().value(attr).map(Value::from),
        _ => None,
    };
    value.ok_or_else(|| unknown(entry, attr))
}

/// Formats an attribute's value like sysfs. Statistics are a row of numbers. An algorithm is a list
/// of all algorithms, with the selected one in brackets.
pub fn format_plain(attr: &str, value: &Value) -> String {
    match value {
        Value::Object(chosen) if attr == "recomp_algorithm" => {
            let line = |(priority, chosen)| format!("#{priority}: {}", among_all(chosen));
            chosen.iter().map(line).collect::<Vec<_>>().join("\n")
        }
        // A value that is not an algorithm is printed unchanged.
        Value::String(chosen) if attr == "comp_algorithm" && chosen.parse::<Algorithm>().is_ok() => {
            among_all(value)
        }
        // As in the kernel, the first line is the version of the format, and the second line the
        // values.
        Value::Object(columns) if attr == "debug_stat" => {
            let of = |key: &str| columns.get(key).map(ToString::to_string).unwrap_or_default();
            format!("version: {}\n{} {}", of("version"), of("writestall"), of("miss_free"))
        }
        Value::String(text) => text.clone(),
        Value::Object(columns) => columns.values().map(|v| format_plain("", v)).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// Returns the names of all algorithms, with the selected one in brackets.
fn among_all(chosen: &Value) -> String {
    let all = Algorithm::ALL.map(|algorithm| match algorithm.name() {
        name if chosen == name => format!("[{name}]"),
        name => name.to_owned(),
    });
    all.join(" ")
}

/// Checks the new values of all attributes in `wanted`, then sets them. If a value is refused,
/// nothing is changed. Only an I/O error while the condition of a zone is changed leaves earlier
/// changes in place.
pub fn set(registry: &Registry, entry: &Arc<Entry>, wanted: &Map<String, Value>) -> Result<(), Refusal> {
    let mut changes = Vec::new();
    let mut layer_changes = layers::Changes::default();
    let mut limits = LimitWords::default();
    let mut policy = entry.restart_policy();
    for (attr, value) in wanted {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            _ => {
                refuse!(invalid, "{}: {attr}: must be a text, a number or a boolean", entry.name());
            }
        };
        let refused = |why| refusal!(invalid, "{}: {attr}={text}: {why}", entry.name());
        if limits.take(attr, &text).map_err(refused)? {
            continue;
        }
        if entry.restart_keys().contains(&attr.as_str()) && policy.take(attr, &text).map_err(refused)? {
            continue;
        }
        if !layer_changes.take(&entry.layers, entry.name(), entry.is_read_only(), attr, &text)? {
            changes.push((check(entry, attr, &text)?, attr, text));
        }
    }
    if policy.keep != entry.is_kept() {
        entry.check_keep(registry, policy.keep)?;
    }
    layer_changes.check(&entry.layers, entry.name(), entry.is_read_only())?;
    changes.sort_unstable_by_key(|(change, ..)| *change);
    let before = entry.limits();
    if !limits.is_empty() {
        entry.set_limits(limits.apply_to(before))?;
    }
    // The layers are changed last, because their changes cannot be undone, and the kind may still
    // refuse its own.
    let set = entry.kind.set(entry, registry, &changes);
    let set = set.and_then(|()| layer_changes.apply(&entry.layers, entry.name()));
    if set.is_err() && !limits.is_empty() {
        // Restoring the old limits cannot fail, because their timer thread already runs.
        let _ = entry.set_limits(before);
    }
    set?;
    entry.set_restart_policy(policy);
    wanted.keys().for_each(|attr| update_words(entry, attr, wanted));
    Ok(())
}

/// Stores the new value of an attribute in the device's words (specification text), from which the
/// device can be created again.
fn update_words(entry: &Entry, attr: &str, wanted: &Map<String, Value>) {
    match attr {
        "disksize" if entry.spec.kind.fork().is_some() => {
            entry.words.put(&entry.spec, "size", &format_plain(attr, &wanted[attr]));
        }
        // A new value changes only a part of these lists, so the resulting list is stored.
        "badblocks" | "zone_readonly" | "zone_offline" => match get(entry, attr) {
            Ok(now) if now == "none" => entry.words.forget(&entry.spec, attr),
            Ok(now) => entry.words.put(&entry.spec, attr, &format_plain(attr, &now)),
            Err(_) => {}
        },
        _ => entry.words.put(&entry.spec, attr, &format_plain(attr, &wanted[attr])),
    }
}

fn check(entry: &Entry, attr: &str, text: &str) -> Result<Change, Refusal> {
    if entry.layers.names().contains(&attr) {
        let settable = schema::settable(&[schema::FAULTS, schema::NULL, schema::ZONES]);
        refuse!(invalid, "{}: {attr}={text}: read-only; {settable} can be set", entry.name());
    }
    entry.kind.check(entry, attr, text).ok_or_else(|| unknown(entry, attr))?
}

fn unknown(entry: &Entry, attr: &str) -> Refusal {
    let (name, names) = (entry.name(), names(entry));
    // In the kernel these are writable attributes, but Freestone has commands instead.
    let words = match attr {
        "compact" | "reset" | "rewind" => Some(""),
        "idle" => Some(" all"),
        "writeback" => Some(" idle"),
        "recompress" => Some(" type=idle"),
        _ => None,
    };
    if let Some(words) = words {
        return refusal!(invalid, "{name}: {attr} is a verb here: freestone {attr} {name}{words}");
    }
    let hint = nearest(attr, &names).map(|h| format!("; {h}?")).unwrap_or_default();
    let (kind, all) = (with_article(entry.kind.name()), names.join(", "));
    refusal!(invalid, "{name}: unknown attribute {attr:?}{hint}; the attributes of {kind} device are {all}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{get, names};
    use std::sync::Arc;

    use crate::kinds::registry::Registry;
    use crate::kinds::{Entry, build};
    use crate::refusal::Refusal;
    use crate::schema;

    fn entry(text: &str) -> Arc<Entry> {
        add(&Registry::default(), text)
    }

    fn add(registry: &Registry, text: &str) -> Arc<Entry> {
        let entry = Arc::new(build(text.parse().unwrap(), registry).unwrap());
        registry.add(&entry).unwrap();
        entry
    }

    fn set(entry: &Arc<Entry>, wanted: &Map<String, Value>) -> Result<(), Refusal> {
        super::set(&Registry::default(), entry, wanted)
    }

    fn wanted(pairs: &[(&str, &str)]) -> Map<String, Value> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect()
    }

    #[test]
    fn every_attribute_has_a_value() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 8192]).unwrap();
        let file = format!("f=file,path={},direct=off", image.display());
        let layered =
            "n=null,size=1M,memory_backed=1,zoned=1,zone_size=64K,faults=none,power_cut=1,badblocks=+1-2";
        for text in [
            "r=ram,disksize=1M,mem_limit=none",
            "r=ram,disksize=1M,faults=read error=EIO,seed=1,power_cut=1",
            "n=null,size=1M,blocksize=512",
            "n=null,size=1M,memory_backed=1,comp_algorithm=zstd,cache_size=64K",
            layered,
            &file,
        ] {
            let entry = entry(text);
            for attr in names(&entry) {
                get(&entry, attr).unwrap();
            }
            assert!(get(&entry, "nonsense").is_err());
        }
        let registry = Registry::default();
        let golden = dir.path().join("golden");
        std::fs::write(&golden, vec![0; 8192]).unwrap();
        let base = format!("base=file,path={},readonly=1,mem_limit=8M,comp_algorithm=zstd", golden.display());
        let other = dir.path().join("other");
        std::fs::write(&other, vec![0; 8192]).unwrap();
        let disk = format!("disk=file,path={}", other.display());
        for text in [
            "r=ram,disksize=1M",
            &base,
            &disk,
            "s=snapshot,origin=r",
            "f=fork,base=s,mem_limit=1M",
            "c=snapshot,origin=disk,chunk_size=8K",
            "t=template,base=base,ttl=5,size=1M",
        ] {
            let entry = add(&registry, text);
            for attr in names(&entry) {
                get(&entry, attr).unwrap();
            }
            assert!(get(&entry, "nonsense").is_err());
        }
        let value = |name: &str, attr: &str| get(&registry.find(name).unwrap(), attr).unwrap();
        assert_eq!((value("s", "origin"), value("f", "mem_limit")), (json!("r"), json!(1 << 20)));
        assert_eq!((value("c", "store"), value("c", "chunk_size")), (json!("N"), json!(8192)));
        assert_eq!((value("t", "ttl"), value("t", "size")), (json!(5), json!(1 << 20)));
        assert_eq!(
            (value("base", "mem_limit"), value("base", "comp_algorithm")),
            (json!(8 << 20), json!("zstd"))
        );
        assert_eq!(get(&entry("r=ram,disksize=1M"), "disksize"), Ok(json!(1 << 20)));
        assert_eq!(get(&entry("n=null,size=1M,blocksize=512"), "blocksize"), Ok(json!(512)));
        assert_eq!(get(&entry(&file), "size"), Ok(json!(8192)));
        assert_eq!(get(&entry(&file), "direct"), Ok(json!("off")));
    }

    #[test]
    fn settable_attributes_change() {
        let entry = entry("r=ram,disksize=1M,mem_limit=1M");
        set(&entry, &wanted(&[("mem_limit", "8M"), ("disksize", "2M"), ("mem_used_max", "0")])).unwrap();
        assert_eq!(get(&entry, "disksize"), Ok(json!(2 << 20)));
        assert_eq!(get(&entry, "mem_limit"), Ok(json!(8 << 20)));
        set(&entry, &wanted(&[("mem_limit", "none")])).unwrap();
        assert_eq!(get(&entry, "mem_limit"), Ok(json!(0)));
    }

    #[test]
    fn refused_set_changes_nothing() {
        let ram = entry("r=ram,disksize=1M,mem_limit=1M");
        let fixed = "fixed once the device is initialised; create a new device with another value";
        let settable = "read-only; disksize (grow), mem_limit, mem_used_max (0), writeback_limit, \
                        writeback_limit_enable, writeback_batch_size, full, full_timeout and mem_warn_threshold can be set";
        for (attr, value, usage, sentence) in [
            ("disksize", "512K", false, "smaller than the present 1M; a device only grows"),
            ("disksize", "16777215T", true, "too large; a ram device has at most 256T"),
            ("disksize", "12", true, "give a unit; 12M? (K, M, G and T are known, 1024-based)"),
            ("mem_used_max", "1", true, "only 0 can be set, which restarts the maximum at the present value"),
            ("comp_algorithm", "zstd", false, fixed),
            ("algorithm_params", "level=3", false, fixed),
            ("mm_stat", "0", true, settable),
            ("backing_dev", "/a", false, fixed),
            ("writeback_limit", "1", false, "the device has no backing_dev; create it with one"),
        ] {
            let refusal = set(&ram, &wanted(&[("mem_limit", "8M"), (attr, value)])).unwrap_err();
            assert_eq!((refusal.usage, refusal.sentence), (usage, format!("r: {attr}={value}: {sentence}")));
            assert_eq!(get(&ram, "mem_limit"), Ok(json!(1 << 20)));
        }
        let message =
            |entry: &Arc<Entry>, attr: &str| set(entry, &wanted(&[(attr, "1")])).unwrap_err().sentence;
        assert_eq!(message(&ram, "compact"), "r: compact is a verb here: freestone compact r");
        assert!(message(&ram, "memlimit").starts_with("r: unknown attribute \"memlimit\"; mem_limit?; "));
        let null = entry("n=null,size=1M");
        assert_eq!(message(&null, "size"), "n: size=1: fixed for the life of a null device");
        assert_eq!(
            message(&null, "disksize"),
            "n: unknown attribute \"disksize\"; the attributes of a null device are size, blocksize, memory_backed, \
             discard, cache_size, fua, mbps, completion_nsec, badblocks, badblocks_once, badblocks_partial_io, \
             max_sectors, rotational, readonly, iops, bps, iops_burst, bps_burst, max_clients"
        );
    }

    #[test]
    fn keys_that_can_be_set_are_those_of_the_schema() {
        let registry = Registry::default();
        add(&registry, "o=ram,disksize=1M");
        add(&registry, "s=snapshot,origin=o");
        for text in [
            "r=ram,disksize=1M,faults=none,zoned=1,zone_size=64K",
            "f=fork,base=s,faults=none",
            "n=null,size=1M,memory_backed=1,badblocks=+1-2,faults=none,zoned=1,zone_size=64K",
        ] {
            let entry = add(&registry, text);
            let kind = entry.kind.name();
            for key in schema::of_kind(kind).chain(schema::LIMITS) {
                let attr = if (kind, key.name) == ("fork", "size") { "disksize" } else { key.name };
                let why = super::set(&registry, &entry, &wanted(&[(attr, "?")])).unwrap_err().sentence;
                let refusals = ["fixed", "read-only;", "unknown attribute"];
                let is_fixed = refusals.iter().any(|refusal| why.contains(refusal));
                assert_eq!(is_fixed, key.change == schema::Change::Fixed, "{why}");
            }
        }
    }

    #[test]
    fn attribute_refused_by_kind_or_layer_changes_nothing() {
        let registry = Registry::default();
        add(&registry, "r=ram,disksize=1M");
        add(&registry, "s=snapshot,origin=r");
        let fork = add(&registry, "f=fork,base=s,faults=none,seed=1,iops=3");
        let null = add(&registry, "n=null,size=1M,faults=none,seed=1,iops=3,badblocks=+1-2");
        let words = "z=null,size=1M,zoned=1,zone_size=64K,readonly=yes,faults=none,seed=1,iops=3";
        let zoned = add(&registry, words);
        let fault = ("faults", "read error=EIO");
        for (entry, refused, why) in [
            (&fork, &[("mem_limit", "1M"), ("mem_min", "2M")][..], "mem_min=2M is above mem_limit=1M"),
            (&null, &[("badblocks", "+4-4095")][..], "is beyond the device"),
            (&zoned, &[("badblocks", "+4-5"), ("zone_offline", "64K")][..], "z: zone_offline=64K: "),
        ] {
            let names = names(entry);
            let values = || names.iter().map(|attr| get(entry, attr).unwrap()).collect::<Vec<_>>();
            let (before, words) = (values(), entry.words.current(&entry.spec));
            let all = [&[fault, ("iops", "7"), ("bps", "1M"), ("seed", "9")], refused].concat();
            let refusal = super::set(&registry, entry, &wanted(&all)).unwrap_err();
            assert!(refusal.sentence.contains(why), "{}", refusal.sentence);
            assert_eq!(values(), before);
            assert!(entry.words.current(&entry.spec) == words);
            super::set(&registry, entry, &wanted(&all[..4])).unwrap();
            assert_eq!(get(entry, "iops"), Ok(json!(7)));
            assert_ne!(values(), before);
        }
    }
}
