//! Setup and attributes of the power layer. The layer keeps unflushed writes in a volatile cache,
//! so that a power cut can lose them, and records a log of writes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::device::Device;
use freestone::power::{self, CutReport, CutTrigger, Power, UNIT_MAX_BYTES, log};
use freestone::replace::CreatedFile;
use serde_json::{Value, json};

use super::{LayerSpec, Layers};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;

/// Attributes of the power layer. All except the last are also keys.
pub(super) const ATTRS: [&str; 4] = ["power_cut", "power_cut_unit", "record", "unflushed"];

/// Smallest value of `power_cut_unit` in bytes: a sector.
const UNIT_MIN_BYTES: u32 = 512;

/// Parses the value of `power_cut_unit`: the size of a unit that a power cut does not tear. Like a
/// block size, it may be a number of bytes without `B`.
pub(super) fn parse_unit(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes.filter(|n: &u32| n.is_power_of_two() && (UNIT_MIN_BYTES..=UNIT_MAX_BYTES).contains(n)).ok_or_else(
        || {
            let max = size::exact(UNIT_MAX_BYTES.into());
            format!("must be a power of two from {UNIT_MIN_BYTES} (bytes) to {max}")
        },
    )
}

/// Parses the trigger of an automatic power cut, such as `1000writes` or `3 flushes`, or `none`
/// (returns `None`).
pub fn parse_after(text: &str) -> Result<Option<CutTrigger>, String> {
    if text == "none" {
        return Ok(None);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = (text[..digits].parse().ok().filter(|count| *count > 0), text[digits..].trim());
    let after = match unit {
        "write" | "writes" => count.map(CutTrigger::Writes),
        "flush" | "flushes" => count.map(CutTrigger::Flushes),
        _ => None,
    };
    after.map(Some).ok_or_else(|| {
        "must be a number of writes or flushes, 1 at least, as in 1000writes or 3flushes; or none".into()
    })
}

/// Adds the power layer to `device`. The layer caches up to `capacity` bytes of unflushed writes
/// (0: the default), and records a log if `spec` contains one. The new log file is added to
/// `new_files`.
pub(super) fn add_layer(
    device: Arc<dyn Device>,
    capacity: u64,
    spec: &LayerSpec,
    new_files: &mut Vec<CreatedFile>,
) -> Result<Power, Refusal> {
    let unit = spec.power_cut_unit.unwrap_or(0);
    let block = device.geometry().logical_block;
    if (1..block).contains(&unit) {
        refuse!(EINVAL, "power_cut_unit={unit}: smaller than a block of the device, {block} bytes");
    }
    let record = spec.record.as_deref().map(record).transpose()?;
    if let Some(writer) = &record {
        new_files.extend(writer.created_file().map_err(|e| refusal!(EIO, "record: {e}"))?);
    }
    let config = power::Config { capacity, record, unit };
    Power::new(device, config).map_err(|e| refusal!(EIO, "{e}"))
}

fn record(path: &Path) -> Result<log::Writer, Refusal> {
    log::Writer::create(path).map_err(|error| {
        let errno = if matches!(error, log::Error::Exists { .. }) { Errno::EEXIST } else { Errno::EIO };
        Refusal::failed(errno, format!("record: {error}"))
    })
}

/// Returns the value of one of the attributes [`ATTRS`]. `record` is the path of the log.
pub(super) fn value(power: &Power, can_cut: bool, record: Option<&Path>, attr: &str) -> Value {
    match attr {
        "power_cut" => json!(u8::from(can_cut)),
        "power_cut_unit" => json!(power.unit()),
        "unflushed" => json!(power.unflushed_bytes()),
        _ => match record {
            Some(path) => json!(path_text::text(path)),
            None => json!("none"),
        },
    }
}

/// Returns the statistics of unflushed writes, power cuts and the recorded log.
pub fn power_stat(power: &Power, layers: &Layers) -> Value {
    let mut stat = json!({
        "unflushed_bytes": power.unflushed_bytes(),
        "unit_bytes": power.unit(),
        "cuts": layers.cuts.load(Ordering::SeqCst),
    });
    let history = *layers.cut_history.lock();
    if let Some(CutReport { seed, kept_blocks, lost_blocks }) = history.last {
        stat["last_seed"] = json!(seed);
        stat["last_kept_blocks"] = json!(kept_blocks);
        stat["last_lost_blocks"] = json!(lost_blocks);
    }
    if let (Some(after), Some(seed)) = (power.pending_cut(), history.seed) {
        stat["cut_after"] = json!(after.to_string());
        stat["next_seed"] = json!(seed);
    }
    if let Some(recording) = power.recording() {
        stat["log_entries"] = json!(recording.entries);
        stat["log_bytes"] = json!(recording.bytes);
        stat["half_set_back"] = json!(power.is_partly_restored());
        stat["log"] = json!(recording.stopped.unwrap_or_else(|| "records".to_owned()));
    }
    stat
}
