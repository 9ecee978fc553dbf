//! Details of one device for the page: `stat`, `get`, rates and latencies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::{Counter, Latency};
use freestone_spec::kinds::Entry;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::api::ApiError;
use crate::service::Service;
use crate::verbs::Verb as _;
use crate::verbs::get::{self, Get};
use crate::verbs::stat::{self, Stat};
use crate::verbs::top::Row;

/// Details of a device.
#[derive(Serialize)]
pub struct Details {
    /// Reply of the verb `stat`.
    stat: Box<RawValue>,
    /// Reply of the verb `get`.
    attributes: Map<String, Value>,
    /// Period of the rates, in seconds.
    seconds: f64,
    /// Rates as in `top`; none for a template.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<Row>,
    /// Latency histogram by operation, since the device was created.
    latency: BTreeMap<&'static str, Vec<Bucket>>,
}

/// Upper bound of the latency in nanoseconds (null: unbounded), and number of requests.
type Bucket = (Option<u64>, u64);

fn buckets(latency: &Latency) -> Vec<Bucket> {
    let nanoseconds = |end: Duration| end.as_nanos() as u64;
    latency.buckets().map(|(end, count)| (end.map(nanoseconds), count)).collect()
}

/// Returns the device of this name.
pub fn find(service: &Service, name: &str) -> Result<Arc<Entry>, ApiError> {
    service.registry.find(name).ok_or_else(|| ApiError::NoDevice(format!("{name}: no such device")))
}

/// Returns the details of a device.
///
/// # Errors
/// The device does not exist, or was removed meanwhile.
pub fn device(service: &Service, name: &str) -> Result<Details, ApiError> {
    let entry = find(service, name)?;
    let look = service.rates.look(&service.registry);
    let seconds = look.since.as_secs_f64();
    let account = entry.account().unwrap_or_default();
    let of = |counter: Counter| (counter.word(), buckets(&account.latency[counter]));
    Ok(Details {
        stat: Stat::run(service, stat::Params::of(name))?,
        attributes: Get::run(service, get::Params::all(name))?,
        seconds,
        rates: look.of(&entry).map(|device| Row::of(device, seconds)),
        latency: Counter::ALL.into_iter().map(of).filter(|(_, buckets)| !buckets.is_empty()).collect(),
    })
}
