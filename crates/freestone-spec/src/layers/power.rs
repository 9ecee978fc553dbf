//! Loss of power over any device, and the log of its writes: how they are set up, attributes.

use std::path::Path;
use std::sync::Arc;

use freestone::device::Device;
use freestone::power::{self, Power, log};
use serde_json::{Value, json};

use crate::path_text;
use crate::refusal::{Errno, Refusal};

/// Its attributes; the first two are its keys.
pub(super) const ATTRS: [&str; 3] = ["power_cut", "record", "unflushed"];

/// Keeps unflushed writes of `device` apart, `capacity` bytes of them where it has a cache, and
/// records where that was asked for.
pub(super) fn over(device: Arc<dyn Device>, capacity: u64, to: Option<&Path>) -> Result<Power, Refusal> {
    let record = to.map(record).transpose()?;
    let config = power::Config { capacity, record };
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
        "unflushed" => json!(power.unflushed_bytes()),
        _ => match record {
            Some(path) => json!(path_text::text(path)),
            None => json!("none"),
        },
    }
}

/// What is not flushed, and the log.
pub fn power_stat(power: &Power, cuts: u64) -> Value {
    let mut stat = json!({
        "unflushed_bytes": power.unflushed_bytes(),
        "cuts": cuts,
    });
    if let Some(recording) = power.recording() {
        stat["log_entries"] = json!(recording.entries);
        stat["log_bytes"] = json!(recording.bytes);
        stat["log"] = json!(recording.stopped.unwrap_or_else(|| "records".to_owned()));
    }
    stat
}
