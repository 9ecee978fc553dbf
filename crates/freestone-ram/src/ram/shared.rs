//! What the devices of a [family](super::family) share.
//!
//! Lock order: `limits` or `passes`, then a slot; under a slot a compression stream or the pool's locks, one after the
//! other. Requests take neither of the first two.

use std::sync::{Arc, Weak};

use super::auto::Auto;
use super::config::{Config, Secondary, SetupError};
use super::keeper::Keeper;
use super::layer::{Layer, Layers};
use super::limits::Limits;
use super::outcome::{Rounds, WritebackError};
use super::removals::{Removals, Retiring};
use super::waiter::{Readers, Waiter};
use crate::age::Ages;
use crate::codec::{Codecs, PRIORITIES, Streams};
use crate::pool::{self, BackRef, Pool};
use crate::spill::store::Store;
use freestone_core::device::Device;
use freestone_core::slot::{Common, Flights, SlotGuard};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Least cap of a device.
const CAP_BYTES_MIN: u64 = 64 << 10;

/// What the devices of a family share.
pub(super) struct Shared {
    pub common: Arc<Common>,
    pub layers: Layers,
    pub retiring: Retiring,
    pub flights: Flights<Waiter>,
    pub pool: Pool,
    pub codecs: Codecs,
    pub ages: Ages,
    /// The backing device.
    pub store: Option<Arc<Store>>,
    pub keeper: Arc<Keeper>,
    pub readers: Readers,
    pub auto: Auto,
    /// Pages that compaction has returned to the system.
    pub compacted: AtomicU64,
    /// As it was made; `mem_limit` may have changed.
    pub config: Config,
    pub mem_limit: AtomicU64,
    /// Held by whoever takes pages out of memory or recompresses them, for the whole of that.
    pub passes: Mutex<()>,
    /// The block at which the next step of reclaiming holes begins.
    pub reclaim_cursor: Mutex<u64>,
    pub removals: Removals,
    pub rounds: Mutex<Rounds>,
    /// What keeps pages from being spilled, as it was logged last.
    pub hindrance: Mutex<Option<WritebackError>>,
    /// Taken to change limits; what is guaranteed to whom.
    pub limits: Mutex<Vec<Weak<Limits>>>,
}

impl Shared {
    /// A family of which nobody knows yet: no thread works for it.
    pub fn new(config: Config, backing: Option<(Arc<dyn Device>, bool)>) -> Result<Arc<Self>, SetupError> {
        let codecs = Codecs::new(Streams::shared(config.comp_algorithm, &config.algorithm_params)?);
        for (priority, secondary) in (1..).zip(&config.recomp_algorithms) {
            if let Some(Secondary { algorithm, params }) = secondary {
                if priority == PRIORITIES && config.auto_recompress.is_some() {
                    return Err(SetupError::PriorityTaken(*algorithm));
                }
                codecs
                    .set(priority, Streams::shared(*algorithm, params)?)
                    .map_err(|_| SetupError::NoMemory)?;
            }
        }
        let store = match backing {
            None => None,
            Some((device, packed)) => {
                Some(Arc::new(Store::new(device, packed).map_err(SetupError::BackingKind)?))
            }
        };
        let keeper = Arc::<Keeper>::default();
        Ok(Arc::new(Self {
            common: Arc::new(Common::new()?),
            layers: Layers::new(Arc::clone(&keeper)),
            retiring: Retiring::default(),
            flights: Flights::default(),
            pool: Pool::new()?,
            codecs,
            ages: Ages::default(),
            store,
            keeper,
            readers: Readers::default(),
            auto: Auto::default(),
            compacted: AtomicU64::new(0),
            config,
            mem_limit: AtomicU64::new(0),
            passes: Mutex::default(),
            reclaim_cursor: Mutex::default(),
            removals: Removals::default(),
            rounds: Mutex::default(),
            hindrance: Mutex::default(),
            limits: Mutex::default(),
        }))
    }

    /// Sets a device's cap (0 is none) and what is guaranteed to it.
    ///
    /// # Errors
    /// A guarantee above the cap, or above what the family's limit leaves beside other guarantees.
    pub fn set_device_limits(&self, limits: &Arc<Limits>, cap: u64, least: u64) -> Result<(), SetupError> {
        if (1..CAP_BYTES_MIN).contains(&cap) {
            return Err(SetupError::CapTooSmall(cap));
        }
        if cap > 0 && least > cap {
            return Err(SetupError::GuaranteeAboveCap { guarantee: least, cap });
        }
        let mut all = self.limits.lock();
        // Most devices have no guarantee, and are not looked at.
        if least > 0 || limits.least() > 0 {
            all.retain(|known| {
                known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(limits))
            });
            let others: u64 = all.iter().filter_map(Weak::upgrade).map(|other| other.least()).sum();
            let total = self.mem_limit();
            if least > 0 && (total == 0 || others.saturating_add(least) > total) {
                if limits.least() > 0 {
                    all.push(Arc::downgrade(limits));
                }
                return Err(SetupError::Guarantee { wanted: least, left: total.saturating_sub(others) });
            }
            all.push(Arc::downgrade(limits));
        }
        limits.set_cap(if cap == 0 { u64::MAX } else { cap });
        limits.set_least(least);
        Ok(())
    }

    pub fn guaranteed(&self) -> u64 {
        self.limits.lock().iter().filter_map(Weak::upgrade).map(|limits| limits.least()).sum()
    }

    pub fn mem_limit(&self) -> u64 {
        // Relaxed: shown only.
        self.mem_limit.load(Ordering::Relaxed)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

impl pool::Owners for Shared {
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>)) {
        let _ = self.at(owner, |_, guard| work(guard));
    }
}

impl Shared {
    /// Locks the slot that `owner` names, if its layer is still there.
    pub fn at<R>(&self, owner: BackRef, work: impl FnOnce(&Arc<Layer>, SlotGuard<'_>) -> R) -> Option<R> {
        let layer = self.layers.get(owner.table())?;
        let leaf = layer.table().leaf(owner.slot())?;
        Some(work(&layer, leaf.lock(owner.slot())))
    }
}
