//! Disks, forks and snapshots: what a device consists of, and how its content is replaced and freed.
//!
//! The room owns chains (a live device and its snapshots), parents, and the parts that the devices of
//! a family share. The rooms of requests, families, content and maintenance use it.
//!
//! Lock order: see [`Inner`]; chains state theirs in [`freestone_core::slot::chain`].

pub(in crate::ram) mod chain;
pub(in crate::ram) mod flights;
pub(in crate::ram) mod parent;
pub(in crate::ram) mod parts;
pub(in crate::ram) mod retire;
pub(in crate::ram) mod rewind;
pub(in crate::ram) mod settings;
pub(in crate::ram) mod snapshot;
pub(crate) mod source;
pub(in crate::ram) mod stats;

use std::sync::Arc;

use self::chain::{Chain, Current, Role, View};
use self::parent::Parent;
use self::parts::FamilyParts;
use self::stats::counter;
use crate::ram::geometry::PAGE;
use crate::ram::memory::config::SetupError;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::limits::Limits;
use crate::ram::memory::pages::Pages;
use crate::ram::memory::record::{self, LayerRecord, LayerState};
use crate::ram::waiting::job::{Job, WaitingRequest};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::percpu::Counters;
use freestone_core::pin::{self, Swap};
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// A compressed RAM disk, a fork or a snapshot. Clones are handles to the same device.
#[derive(Clone)]
pub struct Ram(pub(in crate::ram) Arc<Inner>);

impl PartialEq for Ram {
    /// Returns true if both handles refer to the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// State of one device, shared by all its handles. Lock order: `changing`, then `chain`.
pub(in crate::ram) struct Inner {
    /// Pages of the family. Also reachable through `family`; held here to save an indirection per
    /// request.
    pub pages: Arc<Pages>,
    pub family: Arc<FamilyParts>,
    pub view: Swap<View>,
    /// Size in bytes. A fork can end within a page; the rest of that page is zeroes, and reads as
    /// zeroes when the device grows.
    pub size: AtomicU64,
    pub is_snapshot: bool,
    pub counters: Counters<{ counter::COUNT }>,
    pub limits: Arc<Limits>,
    /// Parent of the device: what its empty slots read from. Every view of the device has the
    /// parent too; this copy is readable without a pin.
    pub parent: Parent,
    /// Not 0 if all content is in the device's own slots: the device is live, has no parent, and
    /// has no page left to load.
    pub plain: AtomicU32,
    /// The chain of the live device, or the chain that contains the snapshot.
    pub chain: Current,
    /// Serialises growth, reset and rewind.
    pub changing: Mutex<()>,
}

impl Ram {
    /// Creates an empty live device over `parent`.
    pub(in crate::ram) fn make(
        family: &Arc<FamilyParts>,
        size: u64,
        parent: Parent,
        limits: Arc<Limits>,
    ) -> Result<Self, SetupError> {
        freestone_core::trail::step!();
        retire::throttle_creation();
        let layer = family.pages.layers.make(&family.pages.common, Arc::clone(&limits))?;
        record::write(layer.table(), &LayerRecord::of_device(layer.id(), size));
        let of_device = parent.of_device();
        Ok(Self::on_chain(family, Chain::new(layer, parent), of_device, size, limits))
    }

    /// Creates the live device of a chain.
    pub(in crate::ram) fn on_chain(
        family: &Arc<FamilyParts>,
        chain: Arc<Chain>,
        parent: Parent,
        size: u64,
        limits: Arc<Limits>,
    ) -> Self {
        let plain = AtomicU32::new(matches!(parent, Parent::Nothing).into());
        Self(Arc::new_cyclic(|this| Inner {
            pages: Arc::clone(&family.pages),
            family: Arc::clone(family),
            view: Swap::new(Box::new(chain.first_view(this.clone()))),
            size: AtomicU64::new(size),
            is_snapshot: false,
            counters: Counters::default(),
            limits,
            parent,
            plain,
            chain: Current::new(chain),
            changing: Mutex::default(),
        }))
    }

    /// Creates the device of a snapshot that is attached to its chain. `view` is the snapshot's view.
    pub(in crate::ram) fn on_snapshot(family: &Arc<FamilyParts>, view: View, size: u64) -> Self {
        let Role::Snapshot { chain, .. } = &view.role else { unreachable!("only snapshots are attached") };
        Self(Arc::new(Inner {
            pages: Arc::clone(&family.pages),
            family: Arc::clone(family),
            size: AtomicU64::new(size),
            is_snapshot: true,
            counters: Counters::default(),
            limits: Arc::default(),
            parent: view.parent.clone(),
            plain: AtomicU32::new(0),
            chain: Current::new(Arc::clone(chain)),
            changing: Mutex::default(),
            view: Swap::new(Box::new(view)),
        }))
    }

    pub(in crate::ram) fn layer_id(&self) -> u32 {
        self.0.layer().id()
    }

    /// Returns a request of this device in the form in which it waits.
    pub(in crate::ram) fn to_waiting(&self, job: Job) -> WaitingRequest {
        self.clone().into_waiting(job)
    }

    pub(in crate::ram) fn into_waiting(self, job: Job) -> WaitingRequest {
        WaitingRequest { owner: self.0, job }
    }

    /// Returns true if this is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        self.0.is_snapshot
    }

    /// Returns true if this is a live device (not a snapshot) with a base.
    pub fn is_fork(&self) -> bool {
        !self.0.is_snapshot && !matches!(self.0.parent.loaded(), Parent::Nothing)
    }
}

impl Inner {
    pub(in crate::ram) fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    /// Returns true if all content is in the device's own slots: a read need not look at snapshots
    /// or a parent.
    #[inline]
    pub(in crate::ram) fn is_plain(&self) -> bool {
        // Acquire: pairs with the Release in `update_plain`.
        self.plain.load(Ordering::Acquire) != 0
    }

    /// Marks the device as plain if it is live, has no parent, and has no page left to load.
    pub(in crate::ram) fn update_plain(&self) {
        if !self.is_snapshot && matches!(self.parent.loaded(), Parent::Nothing) {
            // Release: pairs with the Acquire in `is_plain`; a reader that sees 1 also sees all
            // loaded slots.
            self.plain.store(1, Ordering::Release);
        }
    }

    /// Returns the number of pages of the device; the last one may be partial.
    pub(in crate::ram) fn slots(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    pub(in crate::ram) fn layer(&self) -> Arc<Layer> {
        pin::pinned(|pin| Arc::clone(&self.view.load(pin).layer))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let (layer, number) = pin::pinned(|pin| {
            let view = self.view.load(pin);
            let number = match view.role {
                Role::Live { .. } => None,
                Role::Snapshot { number, .. } => Some(number),
            };
            (Arc::clone(&view.layer), number)
        });
        // Return the guaranteed memory to the family at once, not when the layer is freed.
        self.limits.set_guarantee(0);
        layer.update_reservation(&self.pages.layers);
        if number.is_some() {
            record::set_state(layer.table(), LayerState::Dying);
            kill_points::pass(KillPoint::RemovalRecorded);
        }
        let parent = std::mem::replace(&mut self.parent, Parent::Nothing);
        retire::retire_device(&self.pages, self.chain.get(), number, parent);
    }
}
