//! One device: what `stat` and `get` tell of it, and how long its requests took.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::{Counter, Latency};
use freestone_spec::kinds::Entry;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::api::Why;
use crate::service::Service;
use crate::verbs::Verb as _;
use crate::verbs::get::{self, Get};
use crate::verbs::stat::{self, Stat};
use crate::verbs::top::Row;

/// What is told.
#[derive(Serialize)]
pub struct Told {
    /// As `stat`.
    stat: Box<RawValue>,
    /// As `get`.
    attributes: Map<String, Value>,
    /// The seconds of the rates.
    seconds: f64,
    /// As `top`, of a device that can be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<Row>,
    /// By operation, since the device is there: how long requests took.
    latency: BTreeMap<&'static str, Vec<Bucket>>,
}

/// Less than so many nanoseconds (no end: null), and how many requests took as long.
type Bucket = (Option<u64>, u64);

fn buckets(latency: &Latency) -> Vec<Bucket> {
    let nanoseconds = |end: Duration| end.as_nanos() as u64;
    latency.buckets().map(|(end, count)| (end.map(nanoseconds), count)).collect()
}

/// The device of that name.
pub fn find(service: &Service, name: &str) -> Result<Arc<Entry>, Why> {
    service.registry.find(name).ok_or_else(|| Why::NoDevice(format!("{name}: no such device")))
}

/// All of one device.
///
/// # Errors
/// There is none of that name, or not any more.
pub fn device(service: &Service, name: &str) -> Result<Told, Why> {
    let entry = find(service, name)?;
    let look = service.rates.look(&service.registry);
    let seconds = look.since.as_secs_f64();
    let account = entry.account().unwrap_or_default();
    let of = |counter: Counter| (counter.word(), buckets(&account.latency[counter]));
    Ok(Told {
        stat: Stat::run(service, stat::Params::of(name))?,
        attributes: Get::run(service, get::Params::all(name))?,
        seconds,
        rates: look.of(&entry).map(|device| Row::of(device, seconds)),
        latency: Counter::ALL.into_iter().map(of).filter(|(_, buckets)| !buckets.is_empty()).collect(),
    })
}
