//! A layer: one version of a device's content, as a slot table with its accounts.
//!
//! A disk or fork has one layer at a time; a reset or rewind gives it another, and the old one is
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

/// Bytes that a CPU counts for itself before they are in the common sum: what a cap can be overrun
/// by, for each CPU.
const CHARGE_FOLD_BYTES: u64 = 64 << 10;

/// One version of a device's content: a table with its accounts.
pub(super) struct Layer {
    table: Table,
    /// Names on the backing device whose an object is: the id of the chain's origin, for it and all
    /// of its snapshots, so that an object can go from one to another.
    chain: AtomicU32,
    counters: Counters<{ stored::COUNT }>,
    /// Bytes of the classes of all objects, but for what CPUs still have in their cells.
    charged: AtomicU64,
    limits: Arc<Limits>,
    /// What is kept of the family's memory for it, beside what it has.
    kept: Kept,
    /// How spilling under its cap went.
    history: Mutex<EvictionHistory>,
    /// One of [`LIVE`], [`LOOSE`], [`RETIRED`].
    state: AtomicU32,
}

/// A device's present layer, or a snapshot's.
const LIVE: u32 = 0;
/// A former layer of a device, which snapshots read: no limits hold for it.
const LOOSE: u32 = 1;
/// Nobody uses it any more, it is being freed.
const RETIRED: u32 = 2;

/// Counters of a layer, by index.
pub(super) mod stored {
    pub const PAGES: usize = 0;
    pub const COMPRESSED_BYTES: usize = 1;
    pub const SAME_PAGES: usize = 2;
    pub const HUGE_PAGES: usize = 3;
    pub const HUGE_PAGES_SINCE: usize = 4;
    pub const CHARGED_BYTES: usize = 5;
    /// Pages of an origin that went to a snapshot as they were.
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

    /// Who the pool is told that an object of this slot belongs to.
    pub fn owner(&self, slot: u64) -> BackRef {
        BackRef::new(self.id(), slot)
    }

    /// Whether it is a snapshot's that has begun.
    pub fn is_in_chain(&self) -> bool {
        self.chain() != self.id()
    }

    fn chain(&self) -> u32 {
        // Relaxed: set before the layer is of use to anybody, which the swap of the chain's list
        // orders.
        self.chain.load(Ordering::Relaxed)
    }

    /// Whose an object of this slot is by its header on the backing device.
    pub fn header_owner(&self, slot: u64) -> u64 {
        BackRef::new(self.chain(), slot).bits()
    }

    /// The limits that hold for it.
    #[inline]
    pub fn limits(&self) -> Option<&Limits> {
        // Relaxed: a limit that no longer holds may hold for a moment.
        (self.state.load(Ordering::Relaxed) == LIVE).then_some(&*self.limits)
    }

    /// The bytes that are guaranteed to it.
    pub fn least(&self) -> u64 {
        self.limits().map_or(0, Limits::least)
    }

    /// The most bytes that it may have; `u64::MAX` is no cap.
    #[inline]
    pub fn cap(&self) -> u64 {
        self.limits().map_or(u64::MAX, Limits::cap)
    }

    pub fn is_retired(&self) -> bool {
        // Relaxed: only work in vain is saved.
        self.state.load(Ordering::Relaxed) == RETIRED
    }

    /// It is no device's layer any more, but snapshots read it.
    pub fn set_loose(&self, layers: &Layers) {
        self.set_state(layers, LOOSE);
    }

    /// Nobody uses it any more.
    pub fn retire(&self, layers: &Layers) {
        self.set_state(layers, RETIRED);
    }

    fn set_state(&self, layers: &Layers, state: u32) {
        // Relaxed: see `limits` and `is_retired`.
        self.state.store(state, Ordering::Relaxed);
        self.reckon(layers);
    }

    pub fn get(&self, counter: usize) -> u64 {
        self.counters.get(counter)
    }

    pub fn count(&self, counter: usize, delta: i64) {
        self.counters.add(counter, delta);
    }

    /// Bytes that its objects take of their spans.
    pub fn charged(&self) -> u64 {
        // Relaxed: a statistic. A cell can be negative.
        let sum = self.charged.load(Ordering::Relaxed).wrapping_add(self.counters.sum(stored::CHARGED_BYTES));
        if sum as i64 >= 0 { sum } else { 0 }
    }

    /// Nothing is locked under it.
    pub fn history(&self) -> &Mutex<EvictionHistory> {
        &self.history
    }

    /// Whether another object of `bytes` is within the cap.
    #[inline]
    pub fn has_room(&self, bytes: usize) -> bool {
        let cap = self.cap();
        cap == u64::MAX || self.is_within(cap, bytes)
    }

    #[cold]
    fn is_within(&self, cap: u64, bytes: usize) -> bool {
        let wanted = Pool::charged_bytes(bytes);
        // Relaxed: near the cap the exact sum decides.
        let about = self.charged.load(Ordering::Relaxed);
        let slack = CHARGE_FOLD_BYTES * freestone_core::percpu::cpus() as u64;
        about.saturating_add(wanted + slack) <= cap || self.charged() + wanted <= cap
    }

    /// Counts that a slot went from `old` to `new`.
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

    /// Counts that a page left memory; it is still stored.
    pub fn account_spilled(&self, layers: &Layers, word: Word) {
        self.counters.add(stored::COMPRESSED_BYTES, -(word.stored_bytes() as i64));
        self.counters.add(stored::HUGE_PAGES, -i64::from(word.kind() == Kind::Huge));
        self.charge(layers, -charge_of(word));
    }

    /// Counts that a spilled page is in memory again; it was counted as stored all the time.
    pub fn account_back(&self, layers: &Layers, word: Word) {
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
        // Relaxed: a statistic, that limits look at.
        self.charged.fetch_add(sum as u64, Ordering::Relaxed);
        if self.least() > 0 {
            self.reckon(layers);
        }
        if self.cap() != u64::MAX && self.charged() >= high_mark(self.cap()) {
            layers.keeper.kick();
        }
    }

    /// Sees to it that the family keeps what is left of the guarantee.
    pub fn reckon(&self, layers: &Layers) {
        self.kept.settle(
            // Relaxed: a change that is not seen here is seen by who made it; see `Kept`.
            || (self.least(), self.charged.load(Ordering::Relaxed)),
            |(least, _)| least.saturating_sub(self.charged()),
            |more| layers.add_kept(more),
        );
    }

    /// What is kept for this layer.
    pub fn kept(&self) -> u64 {
        self.kept.get()
    }

    /// Shows every leaf there is, one after the other.
    pub fn each_leaf(&self, mut visit: impl FnMut(u64, Leaf<'_>)) {
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

/// Bytes that are kept for a layer, of which the family has the sum.
///
/// Who changes what they depend on settles them anew. Of several at one time the one that comes
/// last may have looked before the others' changes: it looks again.
#[derive(Default)]
struct Kept(AtomicU64);

impl Kept {
    /// Keeps what `kept` makes of what is `seen`. `add` is told how many more those are, wrapping
    /// where they are less.
    fn settle<S: PartialEq + Copy>(&self, seen: impl Fn() -> S, kept: impl Fn(S) -> u64, add: impl Fn(u64)) {
        loop {
            let now = seen();
            let bytes = kept(now);
            // AcqRel: with the swaps of others that settle; the later one sees what the earlier
            // one's thread changed before.
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

/// The layers of a family, and what is kept for them.
pub(super) struct Layers {
    /// By their tables' ids. Lock order: taken for a look or a change, nothing under it.
    map: RwLock<Map>,
    /// Bytes that are kept for devices which have less than what is guaranteed to them.
    kept: AtomicU64,
    keeper: Arc<Keeper>,
}

#[derive(Default)]
struct Map {
    by_id: BTreeMap<u32, Arc<Layer>>,
    /// By the chain.
    snapshots: BTreeMap<u32, Vec<Arc<Layer>>>,
    next: u32,
}

impl Layers {
    /// None yet. `keeper` is told where one is near its cap.
    pub fn new(keeper: Arc<Keeper>) -> Self {
        Self { map: RwLock::default(), kept: AtomicU64::new(0), keeper }
    }

    /// An empty layer.
    pub fn make(&self, common: &Arc<Common>, limits: Arc<Limits>) -> device::Result<Arc<Layer>> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        // Numbers begin again after 2^28; those in use are passed over.
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
            kept: Kept::default(),
            history: Mutex::default(),
            state: AtomicU32::new(LIVE),
        });
        map.by_id.insert(id, Arc::clone(&layer));
        drop(map);
        layer.reckon(self);
        Ok(layer)
    }

    /// A layer that holds nothing yet is a snapshot's from now on, in the chain of this origin.
    pub fn join(&self, layer: &Arc<Layer>, chain: u32) {
        // Relaxed: see `Layer::chain`.
        layer.chain.store(chain, Ordering::Relaxed);
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        map.snapshots.entry(chain).or_default().push(Arc::clone(layer));
    }

    /// The layer with this id, while it is not freed.
    pub fn get(&self, id: u32) -> Option<Arc<Layer>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    /// All layers, in the order of their ids.
    pub fn all(&self) -> Vec<Arc<Layer>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).by_id.values().cloned().collect()
    }

    /// The layers of a chain: its origin, and its snapshots.
    pub fn of_chain(&self, chain: u32) -> Vec<Arc<Layer>> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let snapshots = map.snapshots.get(&chain).into_iter().flatten();
        map.by_id.get(&chain).into_iter().chain(snapshots).cloned().collect()
    }

    /// The first layer with this id or a higher one.
    pub fn at_or_after(&self, id: u32) -> Option<Arc<Layer>> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.by_id.range(id..).next().map(|(_, layer)| Arc::clone(layer))
    }

    /// Whether no other layer is in use.
    pub fn is_alone(&self, id: u32) -> bool {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.by_id.values().all(|other| other.id() == id || other.is_retired())
    }

    /// Counts what is kept for a layer; wraps where that gets less.
    fn add_kept(&self, bytes: u64) {
        // Relaxed: a hint to those who look for memory.
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Pages that are kept for devices which have less than what is guaranteed to them.
    pub fn kept_pages(&self) -> u64 {
        // Relaxed: a hint. Objects do not fill pages.
        pages_of(self.kept.load(Ordering::Relaxed).saturating_mul(9) / 8)
    }

    /// Pages that this layer must leave to others.
    #[inline]
    pub fn kept_from(&self, layer: &Layer) -> u64 {
        // Relaxed: a hint.
        match self.kept.load(Ordering::Relaxed) {
            0 => 0,
            // Objects do not fill pages.
            kept => pages_of(kept.saturating_sub(layer.kept()).saturating_mul(9) / 8),
        }
    }

    /// Forgets a layer that is empty.
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

/// Pages that hold so many bytes.
pub(super) const fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A thread has looked at what is guaranteed to a layer; before it says so the layer is
    /// retired, and that is settled.
    #[test]
    fn nothing_is_kept_for_what_was_retired_meanwhile() {
        let (kept, sum) = (Kept::default(), AtomicU64::new(0));
        let (guaranteed, retired) = (AtomicU64::new(5000), Cell::new(false));
        let seen = || guaranteed.load(Ordering::SeqCst);
        let add = |more| {
            sum.fetch_add(more, Ordering::SeqCst);
        };
        let slow = |bytes| {
            if !retired.replace(true) {
                guaranteed.store(0, Ordering::SeqCst);
                kept.settle(seen, |bytes| bytes, add);
            }
            bytes
        };
        kept.settle(seen, slow, add);
        assert_eq!((kept.get(), sum.load(Ordering::SeqCst)), (0, 0), "a reservation is left for ever");
        guaranteed.store(700, Ordering::SeqCst);
        kept.settle(seen, slow, add);
        assert_eq!((kept.get(), sum.load(Ordering::SeqCst)), (700, 700));
    }
}
