//! How busy devices are: what they were asked between two looks.
//!
//! Nobody looks unless somebody asks, so a server that nobody watches pays nothing. A look adds up
//! the counters of all devices; who asks again within
//! [`LOOK_EVERY`] is told what the last one found.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::{Counted, Latency};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::registry::Registry;
use uuid::Uuid;

/// Looks are no closer together.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What the looks found.
#[derive(Default)]
pub struct Rates(Mutex<Option<Arc<Look>>>);

/// All devices at one time.
pub struct Look {
    at: Instant,
    /// Since the look before; zero for the first.
    pub since: Duration,
    /// In the order in which they were made; without templates.
    pub devices: Vec<Device>,
    /// By identity: a new device has none of what an old one of its name did.
    known: HashMap<Uuid, usize>,
}

/// One of them. It is not held: what is removed meanwhile goes.
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: &'static str,
    /// What it is a fork of.
    pub fork_of: Option<String>,
    uuid: Uuid,
    /// All that was asked of it.
    pub counted: Counted,
    /// How long all of that took.
    latency: Latency,
    /// What was asked since the look before.
    pub lately: Lately,
}

/// What was asked of a device in a time.
#[derive(Debug, Clone, Default)]
pub struct Lately {
    /// Requests and bytes.
    pub counted: Counted,
    /// How long they took.
    pub latency: Latency,
}

/// What the busiest ones are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Requests a second.
    Requests,
    /// Bytes read and written a second.
    Bytes,
    /// The time in which 99 % of the requests were done.
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

    /// How busy it is: the larger, the busier. What did as much lately is told by all its requests.
    fn busy(&self, by: By) -> (u64, u64) {
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
    /// All devices as they are now, or were a moment ago. Nobody waits for it but who looks as well.
    pub fn look(&self, registry: &Registry) -> Arc<Look> {
        // Who else looks waits for what this one finds. Nothing in here can be half done.
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

/// The base, of a fork.
pub fn fork_of(entry: &Entry) -> Option<&str> {
    entry.spec.kind.below().filter(|_| entry.kind.fork().is_some())
}

impl Look {
    /// What it found of a device.
    pub fn of(&self, entry: &Entry) -> Option<&Device> {
        self.known.get(&entry.identity.uuid).map(|index| &self.devices[*index])
    }

    /// The busiest of those that `are`, at most so many, the busiest first.
    pub fn busiest(&self, most: usize, by: By, are: impl Fn(&Device) -> bool) -> Vec<&Device> {
        let mut found: Vec<_> = self
            .devices
            .iter()
            .filter(|device| are(device))
            .map(|device| (device.busy(by), device))
            .collect();
        // What is as busy stays in the order of making.
        found.sort_by_key(|(busy, _)| std::cmp::Reverse(*busy));
        found.truncate(most);
        found.into_iter().map(|(_, device)| device).collect()
    }
}
