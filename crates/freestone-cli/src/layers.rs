//! What lies over a device's data: bad blocks, zones, pace, faults, loss of power. From the data up:
//!
//! ```text
//! faults        answers late or wrong              keys faults, seed
//! pace          mbps, completion_nsec              null
//! gate          counts, and can be shut            where there is any of the others
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
use freestone::zone::Zones;

use crate::gate::Gate;

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
    pub gate: Option<Arc<Gate>>,
    /// Faults.
    pub faults: Option<Arc<Faults>>,
    /// The seed of the device: faults begin with it, and cuts.
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
        self.seed.wrapping_add(self.cuts.load(Ordering::SeqCst))
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
        let _shut = match &self.gate {
            Some(gate) => Some(gate.shut(QUIET_WAIT).ok_or(CutError::Busy)?),
            None => None,
        };
        let done = action()?;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        Ok(done)
    }

    /// Wipes the device; `below` wipes its data.
    pub fn wipe(&self, below: &dyn Fn() -> device::Result<()>) -> device::Result<()> {
        match &self.power {
            Some(power) => power.reset(below)?,
            None => below()?,
        }
        match &self.zones {
            Some(zones) => zones.wipe(),
            None => Ok(()),
        }
    }
}

/// A seed that nobody chose, short enough to be typed again.
pub fn random_seed() -> u64 {
    u64::from(RandomState::new().build_hasher().finish() as u32)
}
