//! Request rates of devices, from the difference of two samples of their counters.
//!
//! `freestone top`, the web page and the metrics share the samples. A sample ([`Look`]) reads the counters
//! of all devices, and is taken only on request, so an unwatched server pays nothing. Requests within
//! [`LOOK_EVERY`] of the last sample get that sample.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::{Counted, Latency};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;
use uuid::Uuid;

/// Shortest interval between two samples.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The last sample. The mutex is held while a sample is taken.
#[derive(Default)]
pub struct Rates(Mutex<Option<Arc<Look>>>);

/// Sample of all devices at one time.
pub struct Look {
    at: Instant,
    /// Time since the previous sample; zero for the first.
    pub since: Duration,
    /// Devices without templates, in creation order.
    pub devices: Vec<Device>,
    /// Index of each device by UUID. A new device with an old name starts from zero.
    known: HashMap<Uuid, usize>,
}

/// Counters of one device. Holds no reference to the device, so it can be removed meanwhile.
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Kind of the device.
    pub kind: &'static str,
    /// Base of a fork.
    pub fork_of: Option<String>,
    uuid: Uuid,
    /// Counters since the device was created.
    pub counted: Counted,
    /// Latencies since the device was created.
    latency: Latency,
    /// Difference to the previous sample.
    pub lately: Lately,
}

/// Requests of a device between two samples.
#[derive(Debug, Clone, Default)]
pub struct Lately {
    /// Requests and bytes.
    pub counted: Counted,
    /// Latencies of the requests.
    pub latency: Latency,
}

/// Sort key of the busiest devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Requests per second.
    Requests,
    /// Bytes read and written per second.
    Bytes,
    /// 99th percentile of the latency.
    Latency,
}

impl Device {
    fn new(entry: &Entry, before: Option<&Self>) -> Option<Self> {
        let account = entry.account()?;
        let (counted, latency) = (account.counted, account.latency_of_all());
        let lately = before.map(|before| Lately {
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
            lately: lately.unwrap_or_default(),
        })
    }

    /// Returns the sort value; larger means busier. All requests of the device break ties.
    fn activity(&self, by: By) -> (u64, u64) {
        let counted = &self.lately.counted;
        let lately = match by {
            By::Requests => counted.answered(),
            By::Bytes => counted.read_bytes + counted.written_bytes,
            By::Latency => self.lately.latency.within(990).map_or(0, |took| took.as_nanos() as u64),
        };
        (lately, self.counted.answered())
    }
}

impl Rates {
    /// Returns a sample of all devices that is at most [`LOOK_EVERY`] old. Blocks only other callers of this
    /// function.
    pub fn look(&self, registry: &Registry) -> Arc<Look> {
        // Concurrent callers wait, and get this sample. A panic cannot leave the sample inconsistent, so
        // poisoning is ignored.
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(look) = last.as_ref().filter(|look| look.at.elapsed() < LOOK_EVERY) {
            return Arc::clone(look);
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
        let look = Arc::new(Look { at, since, known: known.collect(), devices });
        *last = Some(Arc::clone(&look));
        look
    }
}

/// Returns the base of a fork, or None for other devices.
pub fn fork_of(entry: &Entry) -> Option<&str> {
    entry.spec.kind.below().filter(|_| entry.kind.fork().is_some())
}

impl Look {
    /// Returns the counters of a device.
    pub fn of(&self, entry: &Entry) -> Option<&Device> {
        self.known.get(&entry.identity.uuid).map(|index| &self.devices[*index])
    }

    /// Returns at most `most` of the devices that `filter` accepts, the busiest first.
    pub fn busiest(&self, most: usize, by: By, filter: impl Fn(&Device) -> bool) -> Vec<&Device> {
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
