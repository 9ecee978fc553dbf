//! Power-cut layer: keeps unflushed writes of a device apart so that a power cut can lose them, and
//! records a log of writes. Setup and attributes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::device::Device;
use freestone::power::{self, After, Cut, Power, UNIT_MAX_BYTES, log};
use freestone::replace::MadeFile;
use serde_json::{Value, json};

use super::{LayerSpec, Layers};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;

/// Attributes of the layer. All but the last are keys as well.
pub(super) const ATTRS: [&str; 4] = ["power_cut", "power_cut_unit", "record", "unflushed"];

/// Smallest `power_cut_unit`, in bytes: a sector.
const UNIT_MIN_BYTES: u32 = 512;

/// Parses `power_cut_unit`, the bytes that a power cut does not tear. As for a block size, a number
/// without a unit is accepted as bytes.
pub(super) fn parse_unit(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes.filter(|n: &u32| n.is_power_of_two() && (UNIT_MIN_BYTES..=UNIT_MAX_BYTES).contains(n)).ok_or_else(
        || {
            let max = size::exact(UNIT_MAX_BYTES.into());
            format!("must be a power of two from {UNIT_MIN_BYTES} (bytes) to {max}")
        },
    )
}

/// Parses after what a power cut happens by itself: `1000writes`, `3 flushes`, or `none`.
///
/// # Errors
/// Returns the allowed values.
pub fn parse_after(text: &str) -> Result<Option<After>, String> {
    if text == "none" {
        return Ok(None);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = (text[..digits].parse().ok().filter(|count| *count > 0), text[digits..].trim());
    let after = match unit {
        "write" | "writes" => count.map(After::Writes),
        "flush" | "flushes" => count.map(After::Flushes),
        _ => None,
    };
    after.map(Some).ok_or_else(|| {
        "must be a number of writes or flushes, 1 at least, as in 1000writes or 3flushes; or none".into()
    })
}

/// Adds the layer to `device`. It keeps up to `capacity` bytes of unflushed writes (0: the default),
/// and records a log if `spec` has one. A new log is added to `new_files`.
pub(super) fn add_layer(
    device: Arc<dyn Device>,
    capacity: u64,
    spec: &LayerSpec,
    new_files: &mut Vec<MadeFile>,
) -> Result<Power, Refusal> {
    let unit = spec.power_cut_unit.unwrap_or(0);
    let block = device.geometry().logical_block;
    if (1..block).contains(&unit) {
        let why = format!("power_cut_unit={unit}: smaller than a block of the device, {block} bytes");
        return Err(Refusal::failed(Errno::EINVAL, why));
    }
    let record = spec.record.as_deref().map(record).transpose()?;
    if let Some(writer) = &record {
        new_files.extend(writer.made().map_err(|e| Refusal::failed(Errno::EIO, format!("record: {e}")))?);
    }
    let config = power::Config { capacity, record, unit };
    Power::new(device, config).map_err(|e| Refusal::failed(Errno::EIO, e))
}

fn record(path: &Path) -> Result<log::Writer, Refusal> {
    log::Writer::create(path).map_err(|error| {
        let errno = if matches!(error, log::Error::Exists { .. }) { Errno::EEXIST } else { Errno::EIO };
        Refusal::failed(errno, format!("record: {error}"))
    })
}

/// Returns the value of an attribute.
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

/// Returns the statistics of unflushed writes, power cuts and the log.
pub fn power_stat(power: &Power, layers: &Layers) -> Value {
    let mut stat = json!({
        "unflushed_bytes": power.unflushed_bytes(),
        "unit_bytes": power.unit(),
        "cuts": layers.cuts.load(Ordering::SeqCst),
    });
    let history = *layers.cut_history();
    if let Some(Cut { seed, kept_blocks, lost_blocks }) = history.last {
        stat["last_seed"] = json!(seed);
        stat["last_kept_blocks"] = json!(kept_blocks);
        stat["last_lost_blocks"] = json!(lost_blocks);
    }
    if let (Some(after), Some(seed)) = (power.cuts_after(), history.seed) {
        stat["cut_after"] = json!(after.to_string());
        stat["next_seed"] = json!(seed);
    }
    if let Some(recording) = power.recording() {
        stat["log_entries"] = json!(recording.entries);
        stat["log_bytes"] = json!(recording.bytes);
        stat["half_set_back"] = json!(power.is_half_set_back());
        stat["log"] = json!(recording.stopped.unwrap_or_else(|| "records".to_owned()));
    }
    stat
}
