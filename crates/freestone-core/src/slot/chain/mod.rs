//! Chains: a live device and its snapshots, which share pages.
//!
//! A snapshot is a layer that starts empty. An empty slot means "as in the next younger snapshot", and in the
//! youngest snapshot "as in the origin". Before an origin's slot changes, its word *moves* to the youngest
//! live snapshot. The word does not move if that snapshot, or a younger dying one, has the page already. Only
//! the word moves; the compressed object in the pool stays in place. An empty slot of the origin moves as
//! [`Word::BASE`].
//!
//! # Protocol
//! * A word moves from a slot of one layer to the same slot of another only under the origin's slot lock. So
//!   under that lock the chain does not change, except that an object can be relocated in the pool or written
//!   back.
//! * A reader of a snapshot checks the snapshot's own slot. If that is empty, the reader locks the origin's
//!   slot and checks all layers from the snapshot to the origin. If the origin has no leaf, the page was
//!   never written.
//! * The owner of an object is recorded while both slots are locked. Otherwise a thread could remove the word
//!   from its new slot and free the object, and the location could have another owner.
//! * Taking a snapshot has three steps. Writers are frozen: the origin's view is replaced by a frozen one,
//!   which waits for the pins of active writers. The list of snapshots is replaced. Writers are thawed. The
//!   procedure takes no slot lock and blocks no thread: a tried write would block, and a submitted one is
//!   held.
//! * A removed snapshot is *dying*: no words move to it. The words of a dying snapshot move slot by slot to
//!   the next older live snapshot, in the background; until then older snapshots read through the dying one.
//!   If a dying snapshot in between has the page, older snapshots read that page, and the younger one's page
//!   is freed.
//! * Changes of the origin can be recorded ([`Dirty`]), under the slot's lock. The record of changes is part
//!   of the view, so it is replaced exactly when a snapshot is taken.
//! * A page of the parent can be *supplied* to the chain, which then stores the page itself. Under the lock
//!   of the origin's slot the page is stored in this slot. If a writer was first, the page is stored in the
//!   snapshot that refers to the parent.
//!
//! This file reads and changes pages; `members` adds and removes snapshots. The RAM disk and the loom models
//! implement [`ChainFamily`] for their families.
//!
//! Lock order: the origin's slot, then one slot of a snapshot at a time; the slot of a dying snapshot before
//! that of the snapshot that receives its word. A fork's slot is locked before the slots of the chain that the
//! fork is based on.

mod dirty;
mod members;
#[cfg(all(test, loom))]
mod models;

pub use dirty::Dirty;
pub use members::{Chain, CurrentChain};

use super::{Kind, LEAF_SLOTS, SlotGuard, Table, Word};
use crate::device::Result;
use crate::kill_points::{self, KillPoint};
use crate::mutants::{self, Mutant};
use crate::pin::{Pin, Swap};
use crate::sync::Arc;

/// Interface of a chain to its family (a base and its forks, which share memory), which owns the stored
/// pages.
pub trait ChainFamily: Sized {
    /// A version of a device's content: a page table with its own pages.
    type Layer;
    /// Content under the layers of a chain, such as the base of a fork.
    type Parent: Clone;
    /// A device whose requests use a [`View`].
    type Device;
    /// A request that is held while writers are frozen.
    type Job;

    /// Returns the page table of a layer.
    fn table(layer: &Self::Layer) -> &Table;
    /// Returns the view that requests of a device use.
    fn view(device: &Self::Device) -> &Swap<View<Self>>;
    /// Returns the present epoch, which words record as the age of a page.
    fn epoch(&self) -> u8;
    /// Records that slot `slot` of this layer owns an object in the pool. The slot and the object's former
    /// slot are locked, or no other thread can reach them.
    fn set_owner(&self, object: u64, layer: &Self::Layer, slot: u64);
    /// Frees the object of a word that is in no slot.
    fn free(&self, word: Word);
    /// Updates the statistics of a layer for a slot that changed from `old` to `new`.
    fn update_stats(&self, layer: &Self::Layer, old: Word, new: Word);
    /// Counts a page of an origin that moved to a snapshot.
    fn count_preserved_page(&self, origin: &Self::Layer);
    /// Records that a layer has no device any more, although snapshots may still read the layer.
    fn mark_unused(&self, layer: &Self::Layer);
}

/// State of a device that its requests use.
pub struct View<K: ChainFamily> {
    /// Layer of the device.
    pub layer: Arc<K::Layer>,
    /// Source of pages that neither the layer nor the chain has.
    pub parent: K::Parent,
    /// Role of the device in its chain.
    pub role: Role<K>,
}

/// Role of a device in its chain.
pub enum Role<K: ChainFamily> {
    /// A writable disk or fork.
    Live {
        /// Snapshots and the record of changed pages. `None` if neither exists.
        snapshots: Option<Arc<List<K>>>,
        /// True if writers are frozen.
        frozen: bool,
    },
    /// A snapshot of the chain's live device.
    Snapshot {
        /// Chain of the snapshot.
        chain: Arc<Chain<K>>,
        /// Number of the snapshot in the chain.
        number: u64,
    },
}

/// Layers of a chain at one point in time.
pub struct List<K: ChainFamily> {
    origin: Arc<K::Layer>,
    /// Snapshots of the chain, oldest first.
    snapshots: Vec<Member<K>>,
    /// Record of the origin's changed pages, if changes are recorded.
    dirty: Option<Arc<Dirty>>,
}

struct Member<K: ChainFamily> {
    /// Number of the snapshot; increases with each snapshot of the chain.
    number: u64,
    layer: Arc<K::Layer>,
    dying: bool,
}

impl<K: ChainFamily> Clone for Member<K> {
    fn clone(&self) -> Self {
        Self { number: self.number, layer: Arc::clone(&self.layer), dying: self.dying }
    }
}

impl<K: ChainFamily> List<K> {
    /// Records that a locked slot of the origin is about to change.
    #[inline]
    fn record_change(&self, slot: u64) {
        if let Some(dirty) = &self.dirty {
            dirty.set(slot);
        }
    }

    /// Returns the snapshots from number `number` on to the youngest.
    fn members_from(&self, number: u64) -> &[Member<K>] {
        &self.snapshots[self.snapshots.partition_point(|member| member.number < number)..]
    }
}

/// Returns the snapshot that must receive a word, given `members` from younger to older. The receiver is the
/// first live snapshot. Returns `None` if this snapshot or a dying one before it has the page already. The
/// origin's slot must be locked.
fn receiver<'a, K: ChainFamily + 'a>(
    members: impl Iterator<Item = &'a Member<K>>,
    slot: u64,
) -> Option<&'a K::Layer> {
    for member in members {
        if K::table(&member.layer).leaf(slot).is_some_and(|leaf| leaf.peek(slot) != Word::EMPTY) {
            return None;
        }
        if !member.dying {
            return Some(&member.layer);
        }
    }
    None
}

/// Moves a word to an empty slot of a snapshot. The word's present slot is locked. Returns the locked new slot,
/// which the caller unlocks when the word has left the present one: while both slots have the word, no other
/// thread may move the object. A process that adopts the tables could otherwise find a word that is out of date.
fn move_word<'t, K: ChainFamily>(
    family: &K,
    from: &K::Layer,
    to: &'t K::Layer,
    slot: u64,
    word: Word,
) -> Result<SlotGuard<'t>> {
    let mut guard = K::table(to).leaf_or_new(slot)?.lock(slot);
    debug_assert_eq!(guard.word(), Word::EMPTY, "a snapshot's slot is filled once");
    let new = match word {
        Word::EMPTY => Word::BASE,
        // A word that moves leaves the batch of the background pass that picked it, so its mark is cleared.
        _ if word.is_picked() => word.unpicked(family.epoch()),
        _ => word,
    };
    if let Some(object) = word.object() {
        family.set_owner(object, to, slot);
    }
    guard.store(new);
    kill_points::pass(KillPoint::WordMoved);
    family.update_stats(from, word, Word::EMPTY);
    family.update_stats(to, Word::EMPTY, new);
    Ok(guard)
}

/// Frees the pages in a leaf of a layer without users. The first result is true if any page was freed, the
/// second if slots in flight remain.
pub fn free_leaf<K: ChainFamily>(family: &K, layer: &K::Layer, start: u64) -> (bool, bool) {
    let Some(leaf) = K::table(layer).leaf(start) else { return (false, false) };
    let (mut freed, mut left) = (false, false);
    for slot in start..start + LEAF_SLOTS {
        let leaked = slot % LEAF_SLOTS == 7 && mutants::on(Mutant::LeakedSlot);
        if leaf.peek(slot) == Word::EMPTY || leaked {
            continue;
        }
        let guard = leaf.lock(slot);
        let word = guard.word();
        if word.kind() == Kind::InFlight {
            left = true;
            continue;
        }
        guard.publish(Word::EMPTY);
        family.update_stats(layer, word, Word::EMPTY);
        family.free(word);
        freed = true;
    }
    (freed, left)
}

// ---- reads --------------------------------------------------------------------------------------

impl<K: ChainFamily> View<K> {
    /// Locks and returns the slot of a page, or `None` if the device's own layer does not have the page.
    #[inline]
    pub fn own_page(&self, slot: u64) -> Option<SlotGuard<'_>> {
        let leaf = K::table(&self.layer).leaf(slot)?;
        let holds = |word: Word| !matches!(word.kind(), Kind::Empty | Kind::Base);
        if !holds(leaf.peek(slot)) {
            return None;
        }
        Some(leaf.lock(slot)).filter(|guard| holds(guard.word()))
    }

    /// Returns true if the snapshot's slot refers to the page of the base. The slot then never changes while
    /// the snapshot exists.
    fn is_base(&self, slot: u64) -> bool {
        K::table(&self.layer).leaf(slot).is_some_and(|leaf| leaf.peek(slot).kind() == Kind::Base)
    }

    /// Calls `found` with the locked slot of the layer that has the page, or with `None` if no layer of the
    /// chain has the page.
    pub fn with_page<R>(
        &self,
        pin: &Pin<'_>,
        slot: u64,
        found: impl FnOnce(Option<(&K::Layer, SlotGuard<'_>)>) -> R,
    ) -> R {
        if let Some(guard) = self.own_page(slot) {
            return found(Some((&self.layer, guard)));
        }
        if self.is_base(slot) {
            return found(None);
        }
        let Role::Snapshot { chain, number } = &self.role else { return found(None) };
        let list = chain.list(pin);
        let Some(leaf) = K::table(&list.origin).leaf(slot) else { return found(None) };
        let origin = leaf.lock(slot);
        for member in list.members_from(*number) {
            if let Some(leaf) = K::table(&member.layer).leaf(slot) {
                let guard = leaf.lock(slot);
                match guard.word() {
                    Word::EMPTY => {}
                    Word::BASE => return found(None),
                    _ => return found(Some((&member.layer, guard))),
                }
            }
        }
        match origin.word() {
            Word::EMPTY => found(None),
            _ => found(Some((&list.origin, origin))),
        }
    }

    /// Returns the number of pages from `slot` on, up to `end`, that are certainly read from the parent.
    pub fn run_of_parent(&self, pin: &Pin<'_>, slot: u64, end: u64) -> u64 {
        let table = match &self.role {
            Role::Live { .. } => K::table(&self.layer),
            // Pages of a snapshot come from its origin.
            Role::Snapshot { chain, .. } => K::table(&chain.list(pin).origin),
        };
        let present = table.next_present(slot, end).unwrap_or(end);
        if present > slot || matches!(self.role, Role::Snapshot { .. }) {
            return present - slot;
        }
        let Some(leaf) = table.leaf(slot) else { return 0 };
        let stop = ((slot | (LEAF_SLOTS - 1)) + 1).min(end);
        (slot..stop).take_while(|&slot| leaf.peek(slot) == Word::EMPTY).count() as u64
    }
}

// ---- changes ------------------------------------------------------------------------------------

impl<K: ChainFamily> View<K> {
    /// Returns true if writers are frozen.
    #[inline]
    pub fn is_frozen(&self) -> bool {
        matches!(self.role, Role::Live { frozen: true, .. })
    }

    /// Returns true if the word of the origin's locked slot must move to a snapshot before the page changes.
    /// Otherwise the page may be overwritten in place. Records the page as changed.
    #[inline]
    pub fn must_preserve(&self, slot: u64) -> bool {
        if slot % 64 == 63 && mutants::on(Mutant::OriginForgetsSnapshot) {
            return false;
        }
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => {
                list.record_change(slot);
                receiver(list.snapshots.iter().rev(), slot).is_some()
            }
            _ => false,
        }
    }

    /// Moves the word of a locked slot to the snapshot that needs it, if any. Returns the word that the
    /// caller must free, and the snapshot's slot, which is unlocked after the present slot has changed.
    #[inline]
    fn preserve(&self, family: &K, slot: u64, held: Word) -> Result<(Word, Option<SlotGuard<'_>>)> {
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => {
                list.record_change(slot);
                match receiver(list.snapshots.iter().rev(), slot) {
                    Some(to) => {
                        let moved = move_word(family, &self.layer, to, slot, held)?;
                        if held != Word::EMPTY {
                            family.count_preserved_page(&self.layer);
                        }
                        Ok((Word::EMPTY, Some(moved)))
                    }
                    None => Ok((held, None)),
                }
            }
            _ => Ok((held, None)),
        }
    }

    /// Replaces the word of a live device's locked slot. The old word moves to the snapshot that needs it. If
    /// no snapshot does, its object is freed. After an error the slot is unchanged and the caller still owns
    /// `new`.
    #[inline]
    pub fn replace(&self, family: &K, slot: u64, guard: SlotGuard<'_>, new: Word) -> Result<()> {
        crate::trail::step!();
        self.exchange(family, slot, guard.word(), new, || guard.publish(new))
    }

    /// Replaces the word of a locked slot like [`replace`](Self::replace). `held` is the present word, or for
    /// a slot in flight the word before the flight. `publish` stores the new word and unlocks the slot.
    #[inline]
    pub fn exchange<R>(
        &self,
        family: &K,
        slot: u64,
        held: Word,
        new: Word,
        publish: impl FnOnce() -> R,
    ) -> Result<R> {
        let (unused, moved) = self.preserve(family, slot, held)?;
        let published = publish();
        drop(moved);
        family.free(unused);
        family.update_stats(&self.layer, unused, new);
        Ok(published)
    }
}
