//! The attributes of what lies over other devices: forks, snapshots, templates, and what the forks of a base share.

use std::sync::atomic::{AtomicU64, Ordering};

use freestone::cow;
use freestone::ram::{Family, FamilyStat, Ram};
use serde_json::{Value, json};

use super::ram::{Change, bd_stat, io_stat, mm_stat};
use crate::entry::Entry;
use crate::refusal::{Errno, Refusal};
use crate::size::exact;
use crate::spec::{CowPlace, KindSpec, parse_limit};

/// Of a fork. `mem_limit` and `mem_min` are its own.
pub const FORK_NAMES: [&str; 10] = [
    "base",
    "disksize",
    "mem_limit",
    "mem_min",
    "comp_algorithm",
    "over_stat",
    "family",
    "mm_stat",
    "io_stat",
    "bd_stat",
];
/// Of a snapshot of a RAM disk or fork.
pub const SNAPSHOT_NAMES: [&str; 7] =
    ["origin", "disksize", "comp_algorithm", "over_stat", "family", "mm_stat", "io_stat"];
/// Of a snapshot of a file.
pub const COW_NAMES: [&str; 12] = [
    "origin",
    "size",
    "readonly",
    "cow",
    "store",
    "chunk_size",
    "status",
    "missed_writes",
    "cow_stat",
    "comp_algorithm",
    "mem_limit",
    "family",
];
/// Of a template.
pub const TEMPLATE_NAMES: [&str; 6] = ["base", "size", "mem_limit", "mem_min", "ttl", "made"];

/// The value of an attribute of a fork, or of a snapshot in memory.
pub fn value(entry: &Entry, ram: &Ram, attr: &str) -> Option<Value> {
    Some(match attr {
        // What was restored may stand on nothing that is known by a name.
        "base" | "origin" => json!(entry.below().unwrap_or("none")),
        "disksize" => json!(entry.size()),
        "mem_limit" => json!(ram.own_limits().0),
        "mem_min" => json!(ram.own_limits().1),
        "comp_algorithm" => json!(ram.config().comp_algorithm.to_string()),
        "over_stat" => over_stat(ram),
        "family" => family_stat(&ram.family()),
        "mm_stat" => mm_stat(ram),
        "io_stat" => io_stat(ram),
        "bd_stat" => bd_stat(ram),
        _ => return None,
    })
}

/// The value of an attribute of a file's snapshot.
pub fn cow_value(entry: &Entry, snapshot: &cow::Snapshot, attr: &str) -> Option<Value> {
    let KindSpec::Snapshot(spec) = &entry.spec.kind else { return None };
    Some(match attr {
        "origin" => json!(spec.origin),
        "size" => json!(entry.size()),
        "readonly" => json!(entry.is_read_only()),
        "cow" => match spec.cow.as_ref().map(|cow| &cow.place) {
            None => json!("none"),
            Some(CowPlace::Device(name)) => json!(name),
            Some(CowPlace::Path(path)) => json!(path.to_string_lossy()),
        },
        "store" => json!(snapshot.kind().to_string()),
        "chunk_size" => json!(snapshot.chunk_bytes()),
        "status" => json!(snapshot.status().to_string()),
        "missed_writes" => missed_writes(snapshot),
        "cow_stat" => cow_stat(snapshot),
        _ => return family_value(entry, attr),
    })
}

/// The value of an attribute of a template.
pub fn template_value(entry: &Entry, made: &AtomicU64, attr: &str) -> Option<Value> {
    let KindSpec::Template(spec) = &entry.spec.kind else { return None };
    Some(match attr {
        "base" => json!(spec.fork.base),
        "size" => json!(entry.size()),
        "mem_limit" => json!(spec.fork.mem_limit),
        "mem_min" => json!(spec.fork.mem_min),
        "ttl" => json!(spec.ttl.map_or(0, |ttl| ttl.as_secs())),
        "made" => json!(made.load(Ordering::SeqCst)),
        _ => return None,
    })
}

/// The value of what the forks of a base share; before the first one, what was asked for.
pub fn family_value(entry: &Entry, attr: &str) -> Option<Value> {
    let asked = entry.spec.family()?;
    let family = entry.family_made();
    Some(match (attr, family) {
        ("comp_algorithm", _) => json!(asked.comp_algorithm.to_string()),
        ("mem_limit", Some(family)) => json!(family.mem_limit()),
        ("mem_limit", None) => {
            json!(asked.mem_limit.or_else(|| crate::machine::half_of_memory().ok()).unwrap_or(0))
        }
        ("family", Some(family)) => family_stat(&family),
        ("family", None) => shown(&FamilyStat::default()),
        _ => return None,
    })
}

/// The numbers of a family.
pub fn family_stat(family: &Family) -> Value {
    shown(&family.stat())
}

fn shown(s: &FamilyStat) -> Value {
    json!({
        "mem_used_total": s.mem_used_total,
        "mem_limit": s.mem_limit,
        "charged_bytes": s.charged,
        "retiring_bytes": s.retiring,
        "guaranteed_bytes": s.guaranteed,
        "layers": s.layers,
    })
}

/// What a fork or snapshot holds itself.
pub fn over_stat(ram: &Ram) -> Value {
    let s = ram.over_stat();
    json!({
        "own_bytes": s.own_bytes,
        "charged_bytes": s.charged,
        "mem_limit": s.mem_limit,
        "mem_min": s.mem_min,
        "handed_over": s.handed_over,
        "snapshots": ram.snapshots(),
    })
}

/// Whether a file's snapshot missed writes of its origin before it was opened.
pub fn missed_writes(snapshot: &cow::Snapshot) -> Value {
    json!(match snapshot.missed_writes() {
        cow::Missed::Nothing => "no",
        cow::Missed::Unknown => "unknown",
        cow::Missed::Writes => "yes",
    })
}

/// What a file's snapshot did.
pub fn cow_stat(snapshot: &cow::Snapshot) -> Value {
    let s = snapshot.stats();
    json!({
        "copied_chunks": s.copied_chunks,
        "full_chunk_writes": s.full_chunk_writes,
        "origin_writes_waited": s.origin_writes_waited,
        "origin_reads": s.origin_reads,
        "rereads": s.rereads,
        "exceptions": s.exceptions,
        "commits": s.commits,
        "largest_commit": s.largest_commit,
    })
}

/// How far a merge is; `None` where none was begun.
pub fn merge(status: &cow::MergeStatus) -> Option<Value> {
    Some(match status {
        cow::MergeStatus::None => return None,
        cow::MergeStatus::Running => json!("running"),
        cow::MergeStatus::Stopped => json!("stopped"),
        cow::MergeStatus::Finished => json!("finished"),
        cow::MergeStatus::Failed(why) => json!(format!("failed: {why}")),
    })
}

/// Checks what is to be set of a fork; `None` where there is no such attribute.
pub fn check(ram: &Ram, name: &str, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
    let failed = |errno, why: &str| Refusal::failed(errno, format!("{name}: {attr}={text}: {why}"));
    let invalid = |why: String| Refusal::invalid(format!("{name}: {attr}={text}: {why}"));
    Some(match attr {
        "disksize" => return Change::check(ram, name, attr, text),
        "mem_limit" => parse_limit(text).map(Change::MemLimit).map_err(invalid),
        "mem_min" => parse_limit(text).map(Change::MemMin).map_err(invalid),
        "comp_algorithm" | "base" => {
            Err(failed(Errno::EBUSY, "fixed for the life of a fork; it is what the fork was made of"))
        }
        attr if FORK_NAMES.contains(&attr) => {
            Err(invalid("read-only; disksize (grow), mem_limit and mem_min can be set".into()))
        }
        _ => return None,
    })
}

/// Makes all changes of a fork, or none.
pub fn set(entry: &Entry, ram: &Ram, changes: &[(Change, &String, String)]) -> Result<(), Refusal> {
    let name = entry.name();
    let (mut cap, mut least) = ram.own_limits();
    let mut limits = Vec::new();
    for (change, attr, text) in changes {
        match change {
            Change::MemLimit(bytes) => cap = *bytes,
            Change::MemMin(bytes) => least = *bytes,
            _ => continue,
        }
        limits.push(format!("{attr}={text}"));
    }
    if !limits.is_empty() {
        let limits = limits.join(" ");
        ram.set_own_limits(cap, least).map_err(|error| {
            let why = match error {
                freestone::ram::SetupError::Guarantee { left, .. } => {
                    format!("the family's mem_limit has {} left for guarantees", exact(left))
                }
                freestone::ram::SetupError::GuaranteeAboveCap { guarantee, cap } => {
                    format!("mem_min={} is above mem_limit={}", exact(guarantee), exact(cap))
                }
                error => error.to_string(),
            };
            Refusal::failed(Errno::EINVAL, format!("{name}: {limits}: {why}"))
        })?;
    }
    for (change, attr, text) in changes {
        if let Change::Grow(bytes) = change {
            let grown = ram.grow(*bytes);
            grown.map_err(|e| Refusal::failed(Errno::EINVAL, format!("{name}: {attr}={text}: {e}")))?;
        }
    }
    Ok(())
}
