//! Loss of power over any device, and the log of its writes: how they are set up, attributes.

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

/// Its attributes; all but the last are its keys.
pub(super) const ATTRS: [&str; 4] = ["power_cut", "power_cut_unit", "record", "unflushed"];

const UNIT_MIN_BYTES: u32 = 512;

/// What a cut does not tear. As of a block size, the bare number is welcome.
pub(super) fn parse_unit(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes.filter(|n: &u32| n.is_power_of_two() && (UNIT_MIN_BYTES..=UNIT_MAX_BYTES).contains(n)).ok_or_else(
        || {
            let max = size::exact(UNIT_MAX_BYTES.into());
            format!("must be a power of two from {UNIT_MIN_BYTES} (bytes) to {max}")
        },
    )
}

/// When the power goes off by itself: `1000writes`, `3 flushes`; `none` is never.
///
/// # Errors
/// What is allowed.
pub fn parse_after(text: &str) -> Result<Option<After>, String> {
    if text == "none" {
        return Ok(None);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, what) = (text[..digits].parse().ok().filter(|count| *count > 0), text[digits..].trim());
    let after = match what {
        "write" | "writes" => count.map(After::Writes),
        "flush" | "flushes" => count.map(After::Flushes),
        _ => None,
    };
    after.map(Some).ok_or_else(|| {
        "must be a number of writes or flushes, 1 at least, as in 1000writes or 3flushes; or none".into()
    })
}

/// Keeps unflushed writes of `device` apart, `capacity` bytes of them where it has a cache, and
/// records where that was asked for. The log is added to `made`.
pub(super) fn over(
    device: Arc<dyn Device>,
    capacity: u64,
    asked: &LayerSpec,
    made: &mut Vec<MadeFile>,
) -> Result<Power, Refusal> {
    let unit = asked.power_cut_unit.unwrap_or(0);
    let block = device.geometry().logical_block;
    if (1..block).contains(&unit) {
        let why = format!("power_cut_unit={unit}: smaller than a block of the device, {block} bytes");
        return Err(Refusal::failed(Errno::EINVAL, why));
    }
    let record = asked.record.as_deref().map(record).transpose()?;
    if let Some(writer) = &record {
        made.extend(writer.made().map_err(|e| Refusal::failed(Errno::EIO, format!("record: {e}")))?);
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

/// The value of an attribute.
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

/// What is not flushed, the cuts, and the log.
pub fn power_stat(power: &Power, layers: &Layers) -> Value {
    let mut stat = json!({
        "unflushed_bytes": power.unflushed_bytes(),
        "unit_bytes": power.unit(),
        "cuts": layers.cuts.load(Ordering::SeqCst),
    });
    let known = *layers.known();
    if let Some(Cut { seed, kept_blocks, lost_blocks }) = known.last {
        stat["last_seed"] = json!(seed);
        stat["last_kept_blocks"] = json!(kept_blocks);
        stat["last_lost_blocks"] = json!(lost_blocks);
    }
    if let (Some(after), Some(seed)) = (power.cuts_after(), known.seed) {
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
