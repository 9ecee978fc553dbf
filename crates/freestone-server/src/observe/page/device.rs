//! Details of one device for the web page: `stat`, `get`, rates and latencies.

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
use crate::verbs::devices::get::{self, Get};
use crate::verbs::status::stat::{self, Stat};
use crate::verbs::status::top::Row;

/// Details of a device, as the API returns them.
#[derive(Serialize)]
pub struct Details {
    /// Reply of the verb `stat`.
    stat: Box<RawValue>,
    /// Reply of the verb `get`.
    attributes: Map<String, Value>,
    /// Length of the interval that the rates are averaged over, in seconds.
    seconds: f64,
    /// Request rates as in `top`; None for a template, which has no counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<Row>,
    /// Latency histogram of each operation, since the device was created. Operations without requests are
    /// omitted.
    latency: BTreeMap<&'static str, Vec<Bucket>>,
}

/// Bucket of a latency histogram: upper bound in nanoseconds (None if unbounded), and number of requests.
type Bucket = (Option<u64>, u64);

fn buckets(latency: &Latency) -> Vec<Bucket> {
    let nanoseconds = |end: Duration| end.as_nanos() as u64;
    latency.buckets().map(|(end, count)| (end.map(nanoseconds), count)).collect()
}

/// Returns the device with this name, or [`ApiError::NoDevice`].
pub fn find(service: &Service, name: &str) -> Result<Arc<Entry>, ApiError> {
    service.registry.find(name).ok_or_else(|| ApiError::NoDevice(format!("{name}: no such device")))
}

/// Returns the details of the device with this name.
///
/// # Errors
/// The device does not exist, or was removed while its details were collected.
pub fn device(service: &Service, name: &str) -> Result<Details, ApiError> {
    let entry = find(service, name)?;
    let sample = service.rates.sample(&service.registry);
    let seconds = sample.since.as_secs_f64();
    let account = entry.account().unwrap_or_default();
    let of = |counter: Counter| (counter.name(), buckets(&account.latency[counter]));
    Ok(Details {
        stat: Stat::run(service, stat::Params::of(name))?,
        attributes: Get::run(service, get::Params::all(name))?,
        seconds,
        rates: sample.of(&entry).map(|device| Row::of(device, seconds)),
        latency: Counter::ALL.into_iter().map(of).filter(|(_, buckets)| !buckets.is_empty()).collect(),
    })
}
