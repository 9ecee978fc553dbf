//! Request rates of devices: the difference between two samples of their counters.
//!
//! `freestone top`, the web page and the metrics share the samples. A sample ([`Sample`]) reads the counters
//! of all devices. Samples are taken only when a client asks for rates, so an unwatched server has no cost.
//! Within [`SAMPLE_INTERVAL`] of the last sample, callers get that sample.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::device::{Latency, OpStats};
use freestone_core::sync::Mutex;
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;
use uuid::Uuid;

/// Minimum interval between two samples. Until then, callers get the last sample.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(500);

/// The last sample. The mutex is locked while a sample is taken.
#[derive(Default)]
pub struct Rates(Mutex<Option<Arc<Sample>>>);

/// The counters of all devices at one time.
pub struct Sample {
    at: Instant,
    /// Time since the previous sample; zero for the first sample.
    pub since: Duration,
    /// All devices except templates, in creation order.
    pub devices: Vec<Device>,
    /// Index in `devices` by UUID. The UUID is used because a new device may have the name of a removed one.
    known: HashMap<Uuid, usize>,
}

/// Counters of one device. No reference to the device is kept, so that the device can be removed meanwhile.
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Kind of the device.
    pub kind: &'static str,
    /// Name of the base, if the device is a fork.
    pub fork_of: Option<String>,
    uuid: Uuid,
    /// Requests and bytes since the device was created.
    pub counted: OpStats,
    /// Latencies of all requests since the device was created.
    latency: Latency,
    /// Requests since the previous sample; zero if the device was not in that sample.
    pub recent: IntervalStats,
}

/// Requests of a device in the interval between two samples.
#[derive(Debug, Clone, Default)]
pub struct IntervalStats {
    /// Number of requests and bytes.
    pub counted: OpStats,
    /// Latencies of the requests.
    pub latency: Latency,
}

/// Criterion by which the busiest devices are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SortKey {
    /// Requests per second.
    Requests,
    /// Bytes read and written per second.
    Bytes,
    /// 99th percentile of the latency of the interval.
    Latency,
}

impl Device {
    fn new(entry: &Entry, before: Option<&Self>) -> Option<Self> {
        let account = entry.account()?;
        let (counted, latency) = (account.ops, account.latency_of_all());
        let recent = before.map(|before| IntervalStats {
            counted: counted.since(&before.counted),
            latency: latency.since(&before.latency),
        });
        Some(Self {
            name: entry.name().to_owned(),
            kind: entry.kind.name(),
            fork_of: fork_of(entry).map(str::to_owned),
            uuid: entry.identity.uuid,
            counted,
            latency,
            recent: recent.unwrap_or_default(),
        })
    }

    /// Returns the sort value of the device; larger means busier. The second number, all requests since the
    /// device was created, breaks ties.
    fn activity(&self, by: SortKey) -> (u64, u64) {
        let counted = &self.recent.counted;
        let recent = match by {
            SortKey::Requests => counted.completed_requests(),
            SortKey::Bytes => counted.read_bytes + counted.written_bytes,
            SortKey::Latency => self.recent.latency.quantile(990).map_or(0, |took| took.as_nanos() as u64),
        };
        (recent, self.counted.completed_requests())
    }
}

impl Rates {
    /// Returns a sample of all devices that is at most [`SAMPLE_INTERVAL`] old. Taking a sample blocks only
    /// other callers of this function.
    pub fn sample(&self, registry: &Registry) -> Arc<Sample> {
        // Concurrent callers wait here, and get the sample taken meanwhile.
        let mut last = self.0.lock();
        if let Some(sample) = last.as_ref().filter(|sample| sample.at.elapsed() < SAMPLE_INTERVAL) {
            return Arc::clone(sample);
        }
        let at = Instant::now();
        let before = last.take();
        let since = before.as_ref().map_or(Duration::ZERO, |before| at - before.at);
        let known = |entry: &Entry| {
            let before = before.as_ref()?;
            before.known.get(&entry.identity.uuid).map(|index| &before.devices[*index])
        };
        let devices: Vec<_> =
            registry.all().into_iter().filter_map(|entry| Device::new(&entry, known(&entry))).collect();
        let known = devices.iter().enumerate().map(|(index, device)| (device.uuid, index));
        let sample = Arc::new(Sample { at, since, known: known.collect(), devices });
        *last = Some(Arc::clone(&sample));
        sample
    }
}

/// Returns the name of the base if the device is a fork, otherwise None.
pub fn fork_of(entry: &Entry) -> Option<&str> {
    entry.spec.kind.parent_name().filter(|_| entry.kind.fork().is_some())
}

impl Sample {
    /// Returns the counters of a device, or None if the device is not in the sample.
    pub fn of(&self, entry: &Entry) -> Option<&Device> {
        self.known.get(&entry.identity.uuid).map(|index| &self.devices[*index])
    }

    /// Returns at most `most` of the devices that `filter` accepts, sorted by `by` with the busiest first.
    pub fn busiest(&self, most: usize, by: SortKey, filter: impl Fn(&Device) -> bool) -> Vec<&Device> {
        let mut found: Vec<_> = self
            .devices
            .iter()
            .filter(|device| filter(device))
            .map(|device| (device.activity(by), device))
            .collect();
        // The sort is stable: equally busy devices stay in creation order.
        found.sort_by_key(|(activity, _)| std::cmp::Reverse(*activity));
        found.truncate(most);
        found.into_iter().map(|(_, device)| device).collect()
    }
}
