//! A layer: one version of a device's content, as a slot table with its counters.
//!
//! A disk or fork has one layer at a time. A reset or rewind replaces the layer with an empty one,
//! and the old layer is freed in the background. A snapshot is a layer, too: see
//! [`chain`](crate::ram::device::chain).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::limits::{Limits, high_mark};
use super::outcome::EvictionHistory;
use super::record::{self, LayerState};
use crate::pool::backrefs::MAX_TABLE_ID;
use crate::pool::{BackRef, Pool};
use crate::ram::waiting::keeper::Keeper;
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::percpu::Counters;
use freestone_core::slot::{Common, Kind, LEAF_SLOTS, Leaf, MAX_SLOTS, Table, Word};
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering, RwLock};

/// Bytes that a CPU counts locally before it adds them to `charged`. A device can exceed its own
/// memory limit by this much for each CPU.
const CHARGE_FOLD_BYTES: u64 = 64 << 10;

/// Number of table ids for layers. The ids above are those of the tables of groups and of shared
/// objects.
pub(in crate::ram) const LAYER_IDS: u32 = MAX_TABLE_ID - 1;

/// A version of a device's content: a slot table with its counters.
pub(in crate::ram) struct Layer {
    table: Table,
    /// Table id of the chain's origin. On the backing device, headers name this id as owner for
    /// objects of the origin and of all its snapshots. So an object can move between these layers
    /// without a new header.
    chain: AtomicU32,
    counters: Counters<{ stored::COUNT }>,
    /// Bytes charged for all objects, except those that CPUs still count locally.
    charged: AtomicU64,
    limits: Arc<Limits>,
    /// Memory of the family (devices that share a memory pool) reserved for this layer: the unused
    /// part of the device's guaranteed memory.
    reservation: Reservation,
    /// Results of recent evictions for the device's own memory limit.
    history: Mutex<EvictionHistory>,
    /// Use of the layer: [`LIVE`], [`LOOSE`] or [`RETIRED`].
    state: AtomicU32,
}

/// State of the current layer of a device or snapshot.
const LIVE: u32 = 0;
/// State of a device's former layer that snapshots still read. The device's limits do not apply to
/// this layer.
const LOOSE: u32 = 1;
/// State of an unused layer that is being freed.
const RETIRED: u32 = 2;

/// Indices of a layer's counters.
pub(in crate::ram) mod stored {
    pub const PAGES: usize = 0;
    pub const COMPRESSED_BYTES: usize = 1;
    pub const SAME_PAGES: usize = 2;
    pub const HUGE_PAGES: usize = 3;
    pub const HUGE_PAGES_SINCE: usize = 4;
    pub const CHARGED_BYTES: usize = 5;
    /// Number of pages whose objects moved from this layer to a snapshot of the device.
    pub const HANDED_OVER: usize = 6;
    pub const COUNT: usize = 7;
}

impl Layer {
    fn new(table: Table, limits: Arc<Limits>) -> Arc<Self> {
        Arc::new(Self {
            chain: AtomicU32::new(table.id()),
            table,
            counters: Counters::default(),
            charged: AtomicU64::new(0),
            limits,
            reservation: Reservation::default(),
            history: Mutex::default(),
            state: AtomicU32::new(LIVE),
        })
    }

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
        // Relaxed: set before the swap that adds the layer to the chain's list of snapshots, which
        // orders the store.
        self.chain.load(Ordering::Relaxed)
    }

    /// Returns the owner that headers on the backing device name for objects of this slot.
    pub fn header_owner(&self, slot: u64) -> u64 {
        BackRef::new(self.chain(), slot).bits()
    }

    /// Returns the device's limits if they apply to the layer; `None` if it is not the current
    /// layer of a device.
    #[inline]
    pub fn limits(&self) -> Option<&Limits> {
        // Relaxed: no harm if a limit applies for a moment longer.
        (self.state.load(Ordering::Relaxed) == LIVE).then_some(&*self.limits)
    }

    /// Returns the limits of the layer's device.
    pub fn shared_limits(&self) -> Arc<Limits> {
        Arc::clone(&self.limits)
    }

    pub fn guarantee(&self) -> u64 {
        self.limits().map_or(0, Limits::guarantee)
    }

    /// Returns the device's own memory limit in bytes; `u64::MAX` if there is none.
    #[inline]
    pub fn cap(&self) -> u64 {
        self.limits().map_or(u64::MAX, Limits::cap)
    }

    pub fn is_retired(&self) -> bool {
        // Relaxed: a stale value only causes useless work.
        self.state.load(Ordering::Relaxed) == RETIRED
    }

    /// Marks the layer as one that no device uses any more and that snapshots still read.
    pub fn mark_unused(&self, layers: &Layers) {
        record::set_state(&self.table, LayerState::Loose);
        self.set_state(layers, LOOSE);
    }

    /// Marks the layer as unused and about to be freed.
    pub fn retire(&self, layers: &Layers) {
        record::set_state(&self.table, LayerState::Retired);
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

    /// Returns the bytes of pool memory charged for the layer's objects: the sum of their class
    /// sizes.
    pub fn charged(&self) -> u64 {
        // Relaxed: a statistic. The sum that a CPU counts locally can be negative, so the total can
        // be too for a moment.
        let sum = self.charged.load(Ordering::Relaxed).wrapping_add(self.counters.sum(stored::CHARGED_BYTES));
        if sum as i64 >= 0 { sum } else { 0 }
    }

    /// Returns the results of recent evictions for the device's own memory limit. Lock order: a
    /// leaf lock.
    pub fn history(&self) -> &Mutex<EvictionHistory> {
        &self.history
    }

    /// Returns true if another object of this size fits within the device's own memory limit.
    #[inline]
    pub fn has_space(&self, bytes: usize) -> bool {
        let cap = self.cap();
        cap == u64::MAX || self.fits_cap(cap, Pool::charged_bytes(bytes))
    }

    /// As [`has_space`](Self::has_space), for objects that are charged with `charged` bytes in total.
    pub fn has_space_for(&self, charged: u64) -> bool {
        let cap = self.cap();
        cap == u64::MAX || self.fits_cap(cap, charged)
    }

    #[cold]
    fn fits_cap(&self, cap: u64, wanted: u64) -> bool {
        // Relaxed: an approximation. Near the limit the exact sum decides.
        let about = self.charged.load(Ordering::Relaxed);
        let slack = CHARGE_FOLD_BYTES * freestone_core::percpu::cpus() as u64;
        about.saturating_add(wanted + slack) <= cap || self.charged() + wanted <= cap
    }

    /// Updates the layer's counters for a slot whose word changed from `old` to `new`.
    #[inline]
    pub fn account(&self, layers: &Layers, old: Word, new: Word) {
        freestone_core::trail::step!();
        let delta = |f: fn(Word) -> bool| i64::from(f(new)) - i64::from(f(old));
        let add = |counter, delta| {
            if delta != 0 {
                self.counters.add(counter, delta);
            }
        };
        add(stored::PAGES, delta(|w| !matches!(w.kind(), Kind::Empty | Kind::Base)));
        add(stored::COMPRESSED_BYTES, new.memory_bytes() as i64 - old.memory_bytes() as i64);
        add(stored::SAME_PAGES, delta(|w| matches!(w.kind(), Kind::Same | Kind::Pattern)));
        add(stored::HUGE_PAGES, delta(|w| w.kind() == Kind::Huge));
        add(stored::HUGE_PAGES_SINCE, i64::from(new.kind() == Kind::Huge));
        self.charge(layers, charge_of(new) - charge_of(old));
    }

    /// Updates the counters for a page that moved to the backing device. The page still counts in
    /// [`stored::PAGES`].
    pub fn account_spilled(&self, layers: &Layers, word: Word) {
        self.counters.add(stored::COMPRESSED_BYTES, -(word.memory_bytes() as i64));
        self.counters.add(stored::HUGE_PAGES, -i64::from(word.kind() == Kind::Huge));
        self.charge(layers, -charge_of(word));
    }

    /// Updates the counters for a written-back page that moved back to memory.
    pub fn account_faulted_in(&self, layers: &Layers, word: Word) {
        self.counters.add(stored::COMPRESSED_BYTES, word.memory_bytes() as i64);
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
        // Relaxed: limit checks tolerate a slightly old sum.
        self.charged.fetch_add(sum as u64, Ordering::Relaxed);
        if self.guarantee() > 0 {
            self.update_reservation(layers);
        }
        if self.cap() != u64::MAX && self.charged() >= high_mark(self.cap()) {
            layers.keeper.kick();
        }
    }

    /// Reserves family memory for the part of the device's guaranteed memory that it does not use
    /// yet.
    pub fn update_reservation(&self, layers: &Layers) {
        self.reservation.settle(
            // Relaxed: if a change is missed here, the thread that made it settles again; see
            // `Reservation`.
            || (self.guarantee(), self.charged.load(Ordering::Relaxed)),
            |(least, _)| least.saturating_sub(self.charged()),
            |more| layers.add_reserved(more),
        );
    }

    pub fn reserved(&self) -> u64 {
        self.reservation.get()
    }

    /// Calls `visit` with the first slot and the leaf of every allocated leaf, in order.
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

/// Bytes reserved for a layer, as part of its guaranteed memory; [`Layers`] has the sum over all
/// layers.
///
/// The reservation depends on the guarantee and the charged bytes. A thread that changes one of
/// them settles the reservation again. If several threads settle at once, the last to store may
/// have read these inputs before the others' changes. So each thread reads the inputs again after
/// its store.
#[derive(Default)]
struct Reservation(AtomicU64);

impl Reservation {
    /// Stores the bytes that `reserve` computes from the inputs, which `seen` reads. `add` receives
    /// the difference to the previous value, wrapping if it is negative.
    fn settle<S: PartialEq + Copy>(
        &self,
        seen: impl Fn() -> S,
        reserve: impl Fn(S) -> u64,
        add: impl Fn(u64),
    ) {
        loop {
            let now = seen();
            let bytes = reserve(now);
            // AcqRel: pairs with the swaps of other settling threads; the thread that swaps later
            // sees the inputs that the earlier thread changed.
            let before = self.0.swap(bytes, Ordering::AcqRel);
            add(bytes.wrapping_sub(before));
            if seen() == now {
                return;
            }
        }
    }

    fn get(&self) -> u64 {
        // Relaxed: a stale value reserves a little too much or too little.
        self.0.load(Ordering::Relaxed)
    }
}

fn charge_of(word: Word) -> i64 {
    match word.memory_bytes() {
        0 => 0,
        bytes => Pool::charged_bytes(bytes) as i64,
    }
}

/// The layers of a family, and the sum of their memory reservations.
pub(in crate::ram) struct Layers {
    /// Layers by table id. Lock order: a leaf lock.
    map: RwLock<Map>,
    /// Bytes reserved for devices that use less than their guaranteed memory: the sum of all
    /// reservations.
    reserved: AtomicU64,
    keeper: Arc<Keeper>,
}

#[derive(Default)]
struct Map {
    by_id: BTreeMap<u32, Arc<Layer>>,
    /// Layers of snapshots, by the table id of their chain's origin.
    snapshots: BTreeMap<u32, Vec<Arc<Layer>>>,
    next: u32,
}

impl Layers {
    /// Creates an empty set of layers. A layer near its device's own memory limit wakes `keeper`,
    /// to evict pages.
    pub fn new(keeper: Arc<Keeper>) -> Self {
        Self { map: RwLock::default(), reserved: AtomicU64::new(0), keeper }
    }

    /// Creates an empty layer with an unused table id.
    pub fn make(&self, common: &Arc<Common>, limits: Arc<Limits>) -> device::Result<Arc<Layer>> {
        freestone_core::trail::step!();
        let mut map = self.map.write();
        // Ids wrap at `LAYER_IDS`; ids in use are skipped.
        while map.by_id.contains_key(&map.next) {
            map.next = (map.next + 1) % LAYER_IDS;
        }
        let id = map.next;
        map.next = (id + 1) % LAYER_IDS;
        let layer = Layer::new(Table::new(id, Arc::clone(common))?, limits);
        map.by_id.insert(id, Arc::clone(&layer));
        drop(map);
        layer.update_reservation(self);
        Ok(layer)
    }

    /// Adds a layer whose table was adopted from another process.
    pub fn adopt(&self, table: Table, limits: Arc<Limits>) -> Arc<Layer> {
        let layer = Layer::new(table, limits);
        let mut map = self.map.write();
        map.next = map.next.max((layer.id() + 1) % LAYER_IDS);
        map.by_id.insert(layer.id(), Arc::clone(&layer));
        layer
    }

    /// Adds an empty layer to a chain, as a snapshot of the origin with table id `chain`.
    pub fn join(&self, layer: &Arc<Layer>, chain: u32) {
        // Relaxed: the later swap of the chain's list of snapshots orders this store.
        layer.chain.store(chain, Ordering::Relaxed);
        let mut map = self.map.write();
        map.snapshots.entry(chain).or_default().push(Arc::clone(layer));
    }

    pub fn get(&self, id: u32) -> Option<Arc<Layer>> {
        self.map.read().by_id.get(&id).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Layer>> {
        self.map.read().by_id.values().cloned().collect()
    }

    /// Returns the layers of the chain whose origin has the table id `chain`: the origin and its
    /// snapshots.
    pub fn layers_of_chain(&self, chain: u32) -> Vec<Arc<Layer>> {
        let map = self.map.read();
        let snapshots = map.snapshots.get(&chain).into_iter().flatten();
        map.by_id.get(&chain).into_iter().chain(snapshots).cloned().collect()
    }

    /// Returns the layer with the lowest table id that is at least `id`.
    pub fn at_or_after(&self, id: u32) -> Option<Arc<Layer>> {
        let map = self.map.read();
        map.by_id.range(id..).next().map(|(_, layer)| Arc::clone(layer))
    }

    /// Returns true if all layers of the family except this one are retired.
    pub fn is_only_active(&self, id: u32) -> bool {
        let map = self.map.read();
        map.by_id.values().all(|other| other.id() == id || other.is_retired())
    }

    /// Adds to the reserved sum. If a reservation shrank, `bytes` is a wrapped negative number.
    fn add_reserved(&self, bytes: u64) {
        // Relaxed: allocations may see a slightly old sum.
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the number of pool pages reserved for devices that use less than their guaranteed
    /// memory.
    pub fn reserved_pages(&self) -> u64 {
        // Relaxed: a slightly old sum is harmless. Reserve 1/8 more, as spans have unused bytes.
        pages_of(self.reserved.load(Ordering::Relaxed).saturating_mul(9) / 8)
    }

    /// Returns the number of pool pages reserved for other layers than this one.
    #[inline]
    pub fn pages_reserved_for_others(&self, layer: &Layer) -> u64 {
        // Relaxed: a slightly old sum is harmless.
        match self.reserved.load(Ordering::Relaxed) {
            0 => 0,
            // Reserve 1/8 more, as spans have unused bytes.
            reserved => pages_of(reserved.saturating_sub(layer.reserved()).saturating_mul(9) / 8),
        }
    }

    pub fn remove(&self, id: u32) {
        let mut map = self.map.write();
        let Some(layer) = map.by_id.remove(&id) else { return };
        if let Some(of_chain) = map.snapshots.get_mut(&layer.chain()) {
            of_chain.retain(|other| other.id() != id);
            if of_chain.is_empty() {
                map.snapshots.remove(&layer.chain());
            }
        }
    }
}

/// Returns the number of pages that `bytes` bytes need.
pub(in crate::ram) const fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// While one thread has read the old guarantee and not yet stored its reservation, another
    /// retires the layer and settles the reservation.
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
