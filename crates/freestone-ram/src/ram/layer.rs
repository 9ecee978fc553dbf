//! A layer: one version of a device's content, as a slot table with its counters.
//!
//! A disk or fork has one layer at a time. A reset or rewind gives it another, and the old one is
//! freed in the background. A snapshot is a layer, too: see [`chain`](super::chain).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use super::keeper::Keeper;
use super::limits::{Limits, high_mark};
use super::outcome::EvictionHistory;
use crate::pool::backrefs::MAX_TABLE_ID;
use crate::pool::{BackRef, Pool};
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::percpu::Counters;
use freestone_core::slot::{Common, Kind, LEAF_SLOTS, Leaf, MAX_SLOTS, Table, Word};
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering, RwLock};

/// Bytes that a CPU counts locally before it adds them to the common sum: the possible overrun of a
/// cap, for each CPU.
const CHARGE_FOLD_BYTES: u64 = 64 << 10;

/// One version of a device's content: a slot table with its counters.
pub(super) struct Layer {
    table: Table,
    /// Owner of the layer's objects in headers on the backing device: the table id of the chain's
    /// origin, for it and all its snapshots, so that an object can move from one layer to another.
    chain: AtomicU32,
    counters: Counters<{ stored::COUNT }>,
    /// Charged bytes of all objects, except for the sums still local to a CPU.
    charged: AtomicU64,
    limits: Arc<Limits>,
    /// Family memory reserved for this layer, beyond what the layer already uses.
    reservation: Reservation,
    /// Results of evictions under the device's own cap.
    history: Mutex<EvictionHistory>,
    /// [`LIVE`], [`LOOSE`] or [`RETIRED`].
    state: AtomicU32,
}

/// Current layer of a device or snapshot.
const LIVE: u32 = 0;
/// Former layer of a device that snapshots still read. No limits apply to it.
const LOOSE: u32 = 1;
/// Unused layer that is being freed.
const RETIRED: u32 = 2;

/// Counters of a layer, by index.
pub(super) mod stored {
    pub const PAGES: usize = 0;
    pub const COMPRESSED_BYTES: usize = 1;
    pub const SAME_PAGES: usize = 2;
    pub const HUGE_PAGES: usize = 3;
    pub const HUGE_PAGES_SINCE: usize = 4;
    pub const CHARGED_BYTES: usize = 5;
    /// Pages whose objects moved from an origin to a snapshot.
    pub const HANDED_OVER: usize = 6;
    pub const COUNT: usize = 7;
}

impl Layer {
    pub fn table(&self) -> &Table {
        &self.table
    }

    pub fn id(&self) -> u32 {
        self.table.id()
    }

    /// Returns the back-reference that the pool stores for an object of this slot.
    pub fn owner(&self, slot: u64) -> BackRef {
        BackRef::new(self.id(), slot)
    }

    /// Returns true if the layer is part of a chain as a snapshot.
    pub fn is_in_chain(&self) -> bool {
        self.chain() != self.id()
    }

    fn chain(&self) -> u32 {
        // Relaxed: set before the layer is published; the swap of the chain's list orders it.
        self.chain.load(Ordering::Relaxed)
    }

    /// Returns the owner of this slot's objects in headers on the backing device.
    pub fn header_owner(&self, slot: u64) -> u64 {
        BackRef::new(self.chain(), slot).bits()
    }

    /// Returns the limits that apply to the layer.
    #[inline]
    pub fn limits(&self) -> Option<&Limits> {
        // Relaxed: a limit may apply for a moment longer than it should.
        (self.state.load(Ordering::Relaxed) == LIVE).then_some(&*self.limits)
    }

    pub fn guarantee(&self) -> u64 {
        self.limits().map_or(0, Limits::guarantee)
    }

    /// Returns the cap in bytes, `u64::MAX` if there is none.
    #[inline]
    pub fn cap(&self) -> u64 {
        self.limits().map_or(u64::MAX, Limits::cap)
    }

    pub fn is_retired(&self) -> bool {
        // Relaxed: a hint that saves useless work.
        self.state.load(Ordering::Relaxed) == RETIRED
    }

    /// Marks a former layer of a device that snapshots still read.
    pub fn set_loose(&self, layers: &Layers) {
        self.set_state(layers, LOOSE);
    }

    /// Marks the layer as unused.
    pub fn retire(&self, layers: &Layers) {
        self.set_state(layers, RETIRED);
    }

    fn set_state(&self, layers: &Layers, state: u32) {
        // Relaxed: see `limits` and `is_retired`.
        self.state.store(state, Ordering::Relaxed);
        self.update_reservation(layers);
    }

    pub fn get(&self, counter: usize) -> u64 {
        self.counters.get(counter)
    }

    pub fn count(&self, counter: usize, delta: i64) {
        self.counters.add(counter, delta);
    }

    /// Returns the bytes that the layer's objects take of their spans.
    pub fn charged(&self) -> u64 {
        // Relaxed: a statistic. The sum of a CPU can be negative.
        let sum = self.charged.load(Ordering::Relaxed).wrapping_add(self.counters.sum(stored::CHARGED_BYTES));
        if sum as i64 >= 0 { sum } else { 0 }
    }

    /// Returns the eviction history. Lock order: a leaf lock.
    pub fn history(&self) -> &Mutex<EvictionHistory> {
        &self.history
    }

    /// Returns true if another object of `bytes` fits under the cap.
    #[inline]
    pub fn has_room(&self, bytes: usize) -> bool {
        let cap = self.cap();
        cap == u64::MAX || self.fits_cap(cap, bytes)
    }

    #[cold]
    fn fits_cap(&self, cap: u64, bytes: usize) -> bool {
        let wanted = Pool::charged_bytes(bytes);
        // Relaxed: near the cap the exact sum decides.
        let about = self.charged.load(Ordering::Relaxed);
        let slack = CHARGE_FOLD_BYTES * freestone_core::percpu::cpus() as u64;
        about.saturating_add(wanted + slack) <= cap || self.charged() + wanted <= cap
    }

    /// Updates the counters for a slot that changed from `old` to `new`.
    #[inline]
    pub fn account(&self, layers: &Layers, old: Word, new: Word) {
        let delta = |f: fn(Word) -> bool| i64::from(f(new)) - i64::from(f(old));
        let add = |counter, delta| {
            if delta != 0 {
                self.counters.add(counter, delta);
            }
        };
        add(stored::PAGES, delta(|w| !matches!(w.kind(), Kind::Empty | Kind::Base)));
        add(stored::COMPRESSED_BYTES, new.stored_bytes() as i64 - old.stored_bytes() as i64);
        add(stored::SAME_PAGES, delta(|w| matches!(w.kind(), Kind::Same | Kind::Pattern)));
        add(stored::HUGE_PAGES, delta(|w| w.kind() == Kind::Huge));
        add(stored::HUGE_PAGES_SINCE, i64::from(new.kind() == Kind::Huge));
        self.charge(layers, charge_of(new) - charge_of(old));
    }

    /// Updates the counters for a page that left memory. The page still counts as stored.
    pub fn account_spilled(&self, layers: &Layers, word: Word) {
        self.counters.add(stored::COMPRESSED_BYTES, -(word.stored_bytes() as i64));
        self.counters.add(stored::HUGE_PAGES, -i64::from(word.kind() == Kind::Huge));
        self.charge(layers, -charge_of(word));
    }

    /// Updates the counters for a written-back page that is in memory again.
    pub fn account_faulted_in(&self, layers: &Layers, word: Word) {
        self.counters.add(stored::COMPRESSED_BYTES, word.stored_bytes() as i64);
        self.counters.add(stored::SAME_PAGES, i64::from(matches!(word.kind(), Kind::Same | Kind::Pattern)));
        self.counters.add(stored::HUGE_PAGES, i64::from(word.kind() == Kind::Huge));
        self.charge(layers, charge_of(word));
    }

    #[inline]
    fn charge(&self, layers: &Layers, delta: i64) {
        if delta != 0
            && let Some(sum) = self.counters.add_and_take(stored::CHARGED_BYTES, delta, CHARGE_FOLD_BYTES)
        {
            self.fold(layers, sum);
        }
    }

    #[cold]
    fn fold(&self, layers: &Layers, sum: i64) {
        // Relaxed: a statistic that limit checks read.
        self.charged.fetch_add(sum as u64, Ordering::Relaxed);
        if self.guarantee() > 0 {
            self.update_reservation(layers);
        }
        if self.cap() != u64::MAX && self.charged() >= high_mark(self.cap()) {
            layers.keeper.kick();
        }
    }

    /// Reserves family memory for the unused rest of the guarantee.
    pub fn update_reservation(&self, layers: &Layers) {
        self.reservation.settle(
            // Relaxed: the thread that makes a change missed here also settles; see `Reservation`.
            || (self.guarantee(), self.charged.load(Ordering::Relaxed)),
            |(least, _)| least.saturating_sub(self.charged()),
            |more| layers.add_reserved(more),
        );
    }

    pub fn reserved(&self) -> u64 {
        self.reservation.get()
    }

    /// Visits every allocated leaf in order.
    pub fn for_each_leaf(&self, mut visit: impl FnMut(u64, Leaf<'_>)) {
        let mut from = 0;
        while let Some(present) = self.table.next_present(from, MAX_SLOTS) {
            let start = present & !(LEAF_SLOTS - 1);
            if let Some(leaf) = self.table.leaf(start) {
                visit(start, leaf);
            }
            from = start + LEAF_SLOTS;
        }
    }
}

/// Bytes reserved for a layer; [`Layers`] has the sum of all layers.
///
/// A thread that changes an input of the reservation settles it again. If several threads settle at
/// once, the last to store may have read the inputs before the others' changes: it reads them
/// again.
#[derive(Default)]
struct Reservation(AtomicU64);

impl Reservation {
    /// Stores the reservation that `reserve` computes from the inputs. `add` receives the
    /// difference to the previous value, wrapping if it is negative.
    fn settle<S: PartialEq + Copy>(
        &self,
        seen: impl Fn() -> S,
        reserve: impl Fn(S) -> u64,
        add: impl Fn(u64),
    ) {
        loop {
            let now = seen();
            let bytes = reserve(now);
            // AcqRel: pairs with the swaps of other settling threads; the later one sees the inputs
            // that the earlier one's thread changed.
            let before = self.0.swap(bytes, Ordering::AcqRel);
            add(bytes.wrapping_sub(before));
            if seen() == now {
                return;
            }
        }
    }

    fn get(&self) -> u64 {
        // Relaxed: a hint.
        self.0.load(Ordering::Relaxed)
    }
}

fn charge_of(word: Word) -> i64 {
    match word.stored_bytes() {
        0 => 0,
        bytes => Pool::charged_bytes(bytes) as i64,
    }
}

/// The layers of a family, and the memory reserved for them.
pub(super) struct Layers {
    /// Layers by table id. Lock order: a leaf lock.
    map: RwLock<Map>,
    /// Bytes reserved for devices that use less than their guarantee.
    reserved: AtomicU64,
    keeper: Arc<Keeper>,
}

#[derive(Default)]
struct Map {
    by_id: BTreeMap<u32, Arc<Layer>>,
    /// Snapshot layers by chain.
    snapshots: BTreeMap<u32, Vec<Arc<Layer>>>,
    next: u32,
}

impl Layers {
    /// Creates an empty set. A layer near its cap kicks `keeper`.
    pub fn new(keeper: Arc<Keeper>) -> Self {
        Self { map: RwLock::default(), reserved: AtomicU64::new(0), keeper }
    }

    /// Creates an empty layer with an unused table id.
    pub fn make(&self, common: &Arc<Common>, limits: Arc<Limits>) -> device::Result<Arc<Layer>> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        // Ids wrap at `MAX_TABLE_ID`; ids in use are skipped.
        while map.by_id.contains_key(&map.next) {
            map.next = (map.next + 1) % MAX_TABLE_ID;
        }
        let id = map.next;
        map.next = (id + 1) % MAX_TABLE_ID;
        let layer = Arc::new(Layer {
            table: Table::new(id, Arc::clone(common))?,
            chain: AtomicU32::new(id),
            counters: Counters::default(),
            charged: AtomicU64::new(0),
            limits,
            reservation: Reservation::default(),
            history: Mutex::default(),
            state: AtomicU32::new(LIVE),
        });
        map.by_id.insert(id, Arc::clone(&layer));
        drop(map);
        layer.update_reservation(self);
        Ok(layer)
    }

    /// Adds an empty layer to a chain, as a snapshot of its origin.
    pub fn join(&self, layer: &Arc<Layer>, chain: u32) {
        // Relaxed: see `Layer::chain`.
        layer.chain.store(chain, Ordering::Relaxed);
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        map.snapshots.entry(chain).or_default().push(Arc::clone(layer));
    }

    pub fn get(&self, id: u32) -> Option<Arc<Layer>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Layer>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).by_id.values().cloned().collect()
    }

    /// Returns the layers of a chain: its origin and its snapshots.
    pub fn layers_of_chain(&self, chain: u32) -> Vec<Arc<Layer>> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let snapshots = map.snapshots.get(&chain).into_iter().flatten();
        map.by_id.get(&chain).into_iter().chain(snapshots).cloned().collect()
    }

    /// Returns the first layer with this id or a higher one.
    pub fn at_or_after(&self, id: u32) -> Option<Arc<Layer>> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.by_id.range(id..).next().map(|(_, layer)| Arc::clone(layer))
    }

    /// Returns true if all layers but this one are retired.
    pub fn is_only_active(&self, id: u32) -> bool {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.by_id.values().all(|other| other.id() == id || other.is_retired())
    }

    /// Adds to the reserved sum; wraps if a reservation shrank.
    fn add_reserved(&self, bytes: u64) {
        // Relaxed: a hint for allocations.
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the pages reserved for devices that use less than their guarantee.
    pub fn reserved_pages(&self) -> u64 {
        // Relaxed: a hint. Spans have unused bytes: 9/8.
        pages_of(self.reserved.load(Ordering::Relaxed).saturating_mul(9) / 8)
    }

    /// Returns the pages reserved for other layers than this one.
    #[inline]
    pub fn pages_reserved_for_others(&self, layer: &Layer) -> u64 {
        // Relaxed: a hint.
        match self.reserved.load(Ordering::Relaxed) {
            0 => 0,
            // Spans have unused bytes: 9/8.
            reserved => pages_of(reserved.saturating_sub(layer.reserved()).saturating_mul(9) / 8),
        }
    }

    pub fn remove(&self, id: u32) {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let Some(layer) = map.by_id.remove(&id) else { return };
        if let Some(of_chain) = map.snapshots.get_mut(&layer.chain()) {
            of_chain.retain(|other| other.id() != id);
            if of_chain.is_empty() {
                map.snapshots.remove(&layer.chain());
            }
        }
    }
}

/// Returns the number of pages that `bytes` need.
pub(super) const fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The layer is retired, and its reservation settled, while another thread that has read the
    /// old guarantee has not yet stored its reservation.
    #[test]
    fn reservation_settles_after_concurrent_retirement() {
        let (reservation, sum) = (Reservation::default(), AtomicU64::new(0));
        let (guaranteed, retired) = (AtomicU64::new(5000), Cell::new(false));
        let seen = || guaranteed.load(Ordering::SeqCst);
        let add = |more| {
            sum.fetch_add(more, Ordering::SeqCst);
        };
        let slow = |bytes| {
            if !retired.replace(true) {
                guaranteed.store(0, Ordering::SeqCst);
                reservation.settle(seen, |bytes| bytes, add);
            }
            bytes
        };
        reservation.settle(seen, slow, add);
        assert_eq!((reservation.get(), sum.load(Ordering::SeqCst)), (0, 0), "a reservation is left for ever");
        guaranteed.store(700, Ordering::SeqCst);
        reservation.settle(seen, slow, add);
        assert_eq!((reservation.get(), sum.load(Ordering::SeqCst)), (700, 700));
    }
}
