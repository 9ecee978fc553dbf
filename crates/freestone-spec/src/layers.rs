//! What lies over a device's data: bad blocks, zones, pace, faults, loss of power. From the data up:
//!
//! ```text
//! faults        answers late or wrong              keys faults, seed
//! pace          mbps, completion_nsec              null
//! quiesce       counts, and can be shut            where there is any of the others
//! zones         write pointers                     zoned=1
//! bad blocks                                       null
//! power         unflushed writes apart, the log    power_cut, cache_size, record
//! data          null, memory, ram, fork, file
//! ```

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use freestone::device;
use freestone::faults::Faults;
use freestone::null::BadBlocks;
use freestone::power::{self, Point, Power};
use freestone::quiesce::Quiesce;
use freestone::zone::Zones;

/// How long a loss of power waits for what is on its way, on a slow disk.
const QUIET_WAIT: Duration = Duration::from_secs(60);

/// The layers that a device has.
#[derive(Default)]
pub struct Layers {
    /// Unflushed writes are kept apart.
    pub power: Option<Arc<Power>>,
    /// The power can be cut.
    pub can_cut: bool,
    /// Blocks that fail.
    pub bad: Option<Arc<BadBlocks>>,
    /// Zones.
    pub zones: Option<Arc<Zones>>,
    /// Counts, and can be shut.
    pub quiesce: Option<Arc<Quiesce>>,
    /// Faults.
    pub faults: Option<Arc<Faults>>,
    /// Zones that are read-only or offline from the beginning on: attribute and place.
    pub conditions: Vec<(&'static str, u64)>,
    /// The seed of the device at its beginning, for faults and cuts.
    pub seed: u64,
    /// It was chosen at random, and has to be told.
    pub seed_is_random: bool,
    /// How often the power was cut.
    pub cuts: AtomicU64,
}

/// Why the power could not be cut.
#[derive(Debug, thiserror::Error)]
pub enum CutError {
    /// Requests do not end.
    #[error("requests are on their way that do not end")]
    Busy,
    /// The device.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The log.
    #[error(transparent)]
    Record(#[from] power::RecordError),
}

impl Layers {
    /// Why what is done to the data alone would not be what users of the device see; `None` where it is.
    pub fn hide(&self) -> Option<&'static str> {
        if self.zones.is_some() {
            Some("it is zoned, and the state of its zones would be missing")
        } else if self.power.is_some() {
            Some("it keeps unflushed writes apart (power_cut, cache_size, record), which would be missing")
        } else {
            None
        }
    }

    /// The seed of the next cut: each cut has another one, and they come again for the same seed of the device.
    pub fn next_seed(&self) -> u64 {
        let seed = self.faults.as_ref().map_or(self.seed, |faults| faults.seed());
        seed.wrapping_add(self.cuts.load(Ordering::SeqCst))
    }

    /// Cuts the power. Nobody should be connected any more.
    pub fn cut(&self, power: &Power, seed: u64) -> Result<power::Cut, CutError> {
        self.quietly(|| {
            Ok(match &self.zones {
                Some(zones) => zones.power_cut(power, seed)?,
                None => power.cut(seed)?,
            })
        })
    }

    /// Goes to a point of the log. Nobody should be connected any more.
    pub fn visit(
        &self,
        power: &Power,
        point: &Point,
        seed: Option<u64>,
        below: &dyn Fn() -> device::Result<()>,
    ) -> Result<power::Visited, CutError> {
        self.quietly(|| Ok(power.visit(point, seed, below)?))
    }

    fn quietly<T>(&self, action: impl FnOnce() -> Result<T, CutError>) -> Result<T, CutError> {
        // What hangs is done already; who waited for the answer is gone.
        if let Some(faults) = &self.faults {
            faults.release();
        }
        let _shut = match &self.quiesce {
            Some(quiesce) => Some(quiesce.shut(QUIET_WAIT).ok_or(CutError::Busy)?),
            None => None,
        };
        // Gone is what the power switch answers where the device below does not.
        let done = action().map_err(|error| match error {
            CutError::Device(device::Error::Gone)
            | CutError::Record(power::RecordError::Device(device::Error::Gone)) => CutError::Busy,
            error => error,
        })?;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        Ok(done)
    }

    /// Wipes the device; `below` wipes its data.
    pub fn wipe(&self, below: &dyn Fn() -> device::Result<()>) -> device::Result<()> {
        match &self.power {
            Some(power) => power.reset(below)?,
            None => below()?,
        }
        let Some(zones) = &self.zones else { return Ok(()) };
        zones.wipe()?;
        for (attr, offset) in &self.conditions {
            condition(zones, attr, *offset)?;
        }
        Ok(())
    }
}

/// Makes the zone that holds `offset` read-only or offline, from whatever it is; empty where it is that already.
pub fn condition(zones: &Zones, attr: &str, offset: u64) -> device::Result<()> {
    if attr == "zone_offline" { zones.set_offline(offset) } else { zones.set_read_only(offset) }
}

/// A seed that nobody chose, short enough to be typed again.
pub fn random_seed() -> u64 {
    u64::from(RandomState::new().build_hasher().finish() as u32)
}
