//! The attributes of test drives, and of what lies over any device's data: zones, faults, loss of power.

use freestone::device::Counted;
use freestone::device::zoned::ZoneCondition;
use freestone::faults::Faults;
use freestone::null::BadBlocks;
use freestone::power::Power;
use freestone::zone::Zones;
use serde_json::{Value, json};

use crate::build::{condition, place};
use crate::entry::{Entry, NullData};
use crate::refusal::{Errno, Refusal};
use crate::spec::{
    NullBacking, NullSpec, SECTOR_BYTES, ZONE_ATTRS, parse_badblocks, parse_faults, parse_offsets,
    parse_seed, rules_of,
};

const FAULT_NAMES: [&str; 2] = ["faults", "seed"];
const POWER_NAMES: [&str; 3] = ["power_cut", "record", "unflushed"];

/// The attributes that a device's layers have.
pub fn names(entry: &Entry) -> Vec<&'static str> {
    let mut names = Vec::new();
    if entry.layers.zones.is_some() {
        names.extend(ZONE_ATTRS);
    }
    if entry.layers.faults.is_some() {
        names.extend(FAULT_NAMES);
    }
    if entry.layers.power.is_some() {
        names.extend(POWER_NAMES);
    }
    names
}

/// The value of an attribute of a null device.
pub fn null_value(entry: &Entry, spec: &NullSpec, attr: &str) -> Option<Value> {
    Some(match attr {
        "size" => json!(entry.size()),
        "blocksize" => json!(spec.blocksize),
        "memory_backed" => json!(u8::from(spec.backing != NullBacking::Nothing)),
        "discard" => json!(u8::from(spec.discard)),
        "cache_size" => json!(spec.cache_size.unwrap_or(0)),
        "fua" => json!(u8::from(spec.fua)),
        "mbps" => json!(spec.mbps),
        "completion_nsec" => json!(spec.completion.as_nanos() as u64),
        "badblocks" => json!(entry.layers.bad.as_ref().map(|bad| ranges(bad)).unwrap_or_default()),
        "badblocks_once" => json!(u8::from(spec.badblocks_once)),
        "badblocks_partial_io" => json!(u8::from(spec.badblocks_partial_io)),
        "max_sectors" => json!(u64::from(spec.max_request) / SECTOR_BYTES),
        "rotational" => json!(u8::from(spec.rotational)),
        "readonly" => json!(u8::from(spec.readonly)),
        _ => return None,
    })
}

/// The value of an attribute of a layer.
pub fn value(entry: &Entry, attr: &str) -> Option<Value> {
    let layers = &entry.layers;
    if let (Some(faults), true) = (&layers.faults, FAULT_NAMES.contains(&attr)) {
        return Some(if attr == "seed" { json!(faults.seed()) } else { json!(rules(faults)) });
    }
    if let (Some(power), true) = (&layers.power, POWER_NAMES.contains(&attr)) {
        return Some(match attr {
            "power_cut" => json!(u8::from(layers.can_cut)),
            "unflushed" => json!(power.unflushed_bytes()),
            _ => match &entry.spec.layers.record {
                Some(path) => json!(path.to_string_lossy()),
                None => json!("none"),
            },
        });
    }
    let (asked, zones) = (entry.spec.layers.zones.as_ref()?, layers.zones.as_ref()?);
    let geometry = entry.device()?.geometry().zones?;
    Some(match attr {
        "zoned" => json!(1),
        "zone_size" => json!(geometry.zone_size),
        "zone_capacity" => json!(if asked.capacity == 0 { asked.size } else { asked.capacity }),
        "zone_nr_conv" => json!(zones.counts().conventional),
        "zone_max_open" => json!(geometry.max_open),
        "zone_max_active" => json!(geometry.max_active),
        "zone_append_max_sectors" => json!(u64::from(geometry.max_append) / SECTOR_BYTES),
        "zone_full" => json!(u8::from(asked.full)),
        "zone_readonly" => json!(in_condition(zones, ZoneCondition::ReadOnly)),
        "zone_offline" => json!(in_condition(zones, ZoneCondition::Offline)),
        _ => return None,
    })
}

fn rules(faults: &Faults) -> String {
    match faults.rules().to_string() {
        none if none.is_empty() => "none".to_owned(),
        rules => rules,
    }
}

/// Bad sectors as the kernel shows them: first and number, a line each; here with `;`.
fn ranges(bad: &BadBlocks) -> String {
    let all = bad.ranges();
    let text = all.iter().map(|(first, last)| format!("+{first}-{last}")).collect::<Vec<_>>();
    if text.is_empty() { "none".to_owned() } else { text.join(";") }
}

fn in_condition(zones: &Zones, condition: ZoneCondition) -> String {
    use freestone::device::Zoned as _;
    let mut found = Vec::new();
    // That there is a zone at the start is certain.
    let _ = zones.report(0, &mut |zone| {
        if zone.condition == condition {
            found.push(place(zone.start));
        }
        true
    });
    if found.is_empty() { "none".to_owned() } else { found.join(";") }
}

// ---- statistics ----------------------------------------------------------------------------------------------------

/// What came to a device, by operation.
pub fn ops(counts: &Counted) -> Value {
    json!({
        "reads": counts.reads,
        "writes": counts.writes,
        "discards": counts.discards,
        "zeroes": counts.zeroes,
        "flushes": counts.flushes,
        "appends": counts.appends,
        "read_bytes": counts.read_bytes,
        "written_bytes": counts.written_bytes,
        "errors": counts.errors,
    })
}

/// Zones by condition, and what was done to them.
pub fn zone_stat(zones: &Zones) -> Value {
    let c = zones.counts();
    json!({
        "conventional": c.conventional,
        "empty": c.empty,
        "implicit_open": c.implicit_open,
        "explicit_open": c.explicit_open,
        "closed": c.closed,
        "full": c.full,
        "read_only": c.read_only,
        "offline": c.offline,
        "appends": c.ops.appends,
        "opens": c.opens,
        "closes": c.closes,
        "finishes": c.finishes,
        "resets": c.resets,
        "implicit_closes": c.implicit_closes,
    })
}

/// What fired how often.
pub fn fault_stat(faults: &Faults) -> Value {
    let rules = faults.counts();
    let rules = rules.iter().map(|c| json!({ "rule": c.rule, "matched": c.matched, "fired": c.fired }));
    json!({ "seed": faults.seed(), "hanging": faults.hanging(), "rules": rules.collect::<Vec<_>>() })
}

/// What is not flushed, and the log.
pub fn power_stat(entry: &Entry, power: &Power) -> Value {
    let mut stat = json!({
        "unflushed_bytes": power.unflushed_bytes(),
        "cuts": entry.layers.cuts.load(std::sync::atomic::Ordering::SeqCst),
    });
    if let Some(recording) = power.recording() {
        stat["log_entries"] = json!(recording.entries);
        stat["log_bytes"] = json!(recording.bytes);
        stat["log"] = json!(recording.stopped.unwrap_or_else(|| "records".to_owned()));
    }
    stat
}

/// What a null device holds.
pub fn null_stat(data: &NullData) -> Option<Value> {
    match data {
        NullData::Nothing => None,
        NullData::Memory(memory) => Some(json!({ "used_bytes": memory.used_bytes() })),
        NullData::Compressed(ram) => Some(super::mm_stat(ram)),
    }
}

// ---- changes -------------------------------------------------------------------------------------------------------

/// What a `set` does to the layers, once everything was checked.
#[derive(Debug, Default)]
pub struct Changes {
    faults: Option<String>,
    seed: Option<u64>,
    badblocks: Vec<String>,
    /// Attribute and place.
    conditions: Vec<(String, u64)>,
}

impl Changes {
    /// Takes an attribute of a layer; `false` where it is none that could be set.
    pub fn take(&mut self, entry: &Entry, attr: &str, text: &str) -> Result<bool, Refusal> {
        let invalid = |why: String| Refusal::invalid(format!("{}: {attr}={text}: {why}", entry.name()));
        let layers = &entry.layers;
        match attr {
            "faults" | "seed" if layers.faults.is_none() => {
                // Not for kinds that cannot have any.
                if layers.quiesce.is_none() && entry.is_read_only() {
                    return Ok(false);
                }
                let why =
                    "the device was created without faults; create it with faults=none to set them later";
                return Err(Refusal::failed(
                    Errno::EINVAL,
                    format!("{}: {attr}={text}: {why}", entry.name()),
                ));
            }
            "faults" => self.faults = Some(parse_faults(text).map_err(invalid)?),
            "seed" => self.seed = Some(parse_seed(text).map_err(invalid)?),
            "badblocks" if layers.bad.is_some() => {
                self.badblocks = parse_badblocks(text).map_err(invalid)?;
            }
            "zone_readonly" | "zone_offline" => {
                let Some(zones) = &layers.zones else { return Ok(false) };
                for offset in parse_offsets(text).map_err(invalid)? {
                    check_place(zones, offset).map_err(invalid)?;
                    self.conditions.push((attr.to_owned(), offset));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Makes them.
    pub fn make(self, entry: &Entry) -> Result<(), Refusal> {
        let layers = &entry.layers;
        let name = entry.name();
        if let Some(bad) = &layers.bad {
            let changed = bad.change_all(&self.badblocks);
            changed.map_err(|e| Refusal::failed(Errno::EINVAL, format!("{name}: {e}")))?;
        }
        if let Some(zones) = &layers.zones {
            for (attr, offset) in &self.conditions {
                condition(zones, attr, *offset).map_err(|why| {
                    Refusal::failed(Errno::EIO, format!("{name}: {attr}={}: {why}", place(*offset)))
                })?;
            }
        }
        if let Some(faults) = &layers.faults {
            match (self.faults, self.seed) {
                (None, None) => {}
                (Some(rules), seed) => faults.set(rules_of(&rules), seed),
                (None, seed) => faults.set(faults.rules(), seed),
            }
        }
        Ok(())
    }
}

/// There must be a sequential zone there.
fn check_place(zones: &Zones, offset: u64) -> Result<(), String> {
    use freestone::device::Zoned as _;
    let mut conventional = false;
    let found = zones.report(offset, &mut |zone| {
        conventional = zone.condition == ZoneCondition::NotWritePointer;
        false
    });
    match found {
        Err(_) => Err(format!("{} lies behind the end of the device", place(offset))),
        Ok(()) if conventional => Err(format!("{} is in a conventional zone", place(offset))),
        Ok(()) => Ok(()),
    }
}
