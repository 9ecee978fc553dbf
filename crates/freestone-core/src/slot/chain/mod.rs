//! Chains: a live device and its snapshots, and who of them holds a page.
//!
//! A snapshot is a layer that begins empty. An empty slot of it means "as the next younger one",
//! and past the youngest "as the origin". Before the origin's slot changes, what it holds *moves*
//! to the youngest snapshot, if neither that one nor a removed one before it has anything there:
//! one word moves, the object stays where it is. An origin's slot that is empty moves as
//! [`Word::BASE`].
//!
//! # Protocol
//! * Words go from a slot of one layer to the same slot of another only under the origin's slot
//!   lock. So under it the whole chain stands still, but for what happens to an object where it is
//!   (it moves in the pool, it is spilled).
//! * A reader of a snapshot looks at the snapshot's own slot; where that is empty, it locks the
//!   origin's slot and looks again from the snapshot to the origin. Where the origin has no leaf
//!   nobody has ever written there.
//! * Whose an object is, is noted while both slots are locked: who takes the word out of its new
//!   slot may free the object, and its place has another owner then.
//! * A snapshot begins in three steps: writers are held up (the origin's view is swapped for one
//!   that says so, which waits for the pins of those that are at work), the list of snapshots is
//!   swapped, writers go on. No page lock is taken, and no thread waits: a write that is tried
//!   meanwhile would block, one that is submitted is held.
//! * A removed snapshot is *dying*: nothing moves to it any more, what it has goes to the next
//!   older one that lives, slot by slot, in the background; older ones read through it until then.
//!   Where an older one that is dying, too, has the page, that is what is read, and the younger
//!   one's is freed.
//! * What of the origin changes can be noted ([`Dirty`]), under the slot's lock. Where to is part of
//!   the view, so that it is exchanged at the moment at which a snapshot begins.
//! * A page that lies below can be *supplied* to the chain, which is then as before, but has the page
//!   itself: under the origin's lock it goes there, or, where a writer was first, to the snapshot
//!   that was told that the page lies below.
//!
//! Who holds a page is here, how snapshots come and go in `members`. The RAM disk and the loom
//! models use it with a [`Kin`] of their own.
//!
//! Lock order: the origin's slot; then one slot of a snapshot at a time. A fork's slot comes before
//! those of the chain that it is a fork of.

mod dirty;
mod members;
#[cfg(all(test, loom))]
mod models;

pub use dirty::Dirty;
pub use members::{Chain, Current};

use super::{Kind, LEAF_SLOTS, SlotGuard, Table, Word};
use crate::device::Result;
use crate::mutants::{self, Mutant};
use crate::pin::{Pin, Swap};
use crate::sync::Arc;

/// The family of a chain, as far as that needs it: whose objects the words stand for.
pub trait Kin: Sized {
    /// One version of a device's content.
    type Layer;
    /// What lies below the layers of a chain.
    type Parent: Clone;
    /// A device.
    type Device;
    /// A request that is held up.
    type Job;

    /// A layer's slots.
    fn table(layer: &Self::Layer) -> &Table;
    /// What a device's requests work with.
    fn view(device: &Self::Device) -> &Swap<View<Self>>;
    /// The present epoch.
    fn now(&self) -> u8;
    /// Notes that an object is a slot's of this layer. Both that slot and the one that the object
    /// was in are locked, or nobody can take it out of either.
    fn set_owner(&self, object: u64, layer: &Self::Layer, slot: u64);
    /// Frees the object of a word that no slot holds.
    fn free(&self, word: Word);
    /// Counts that a slot of a layer went from `old` to `new`.
    fn account(&self, layer: &Self::Layer, old: Word, new: Word);
    /// Counts that a page of an origin went to a snapshot as it was.
    fn went_over(&self, origin: &Self::Layer);
    /// The layer is no device's any more, but snapshots may read it.
    fn set_loose(&self, layer: &Self::Layer);
}

/// What a device is for its requests at one time.
pub struct View<K: Kin> {
    /// Its own slots.
    pub layer: Arc<K::Layer>,
    /// What is read where neither it nor the chain has a page.
    pub parent: K::Parent,
    /// Whether it is written, or part of a chain.
    pub role: Role<K>,
}

/// What a device is in its chain.
pub enum Role<K: Kin> {
    /// A disk or fork.
    Live {
        /// What lives of its snapshots, and where it is noted what changes. `None`: no snapshot
        /// lives, and nobody notes anything.
        snapshots: Option<Arc<List<K>>>,
        /// Writers are held up.
        frozen: bool,
    },
    /// A snapshot.
    Snapshot {
        /// Whose it is.
        chain: Arc<Chain<K>>,
        /// Its number there.
        number: u64,
    },
}

/// The layers of a chain at one time.
pub struct List<K: Kin> {
    origin: Arc<K::Layer>,
    /// Oldest first.
    snapshots: Vec<Member<K>>,
    /// Where it is noted what of the origin changes.
    dirty: Option<Arc<Dirty>>,
}

struct Member<K: Kin> {
    /// Counts up within the chain.
    number: u64,
    layer: Arc<K::Layer>,
    dying: bool,
}

impl<K: Kin> Clone for Member<K> {
    fn clone(&self) -> Self {
        Self { number: self.number, layer: Arc::clone(&self.layer), dying: self.dying }
    }
}

impl<K: Kin> List<K> {
    /// A locked slot of the origin is about to change.
    #[inline]
    fn note(&self, slot: u64) {
        if let Some(dirty) = &self.dirty {
            dirty.set(slot);
        }
    }

    /// The members from `number` on to the youngest.
    fn from(&self, number: u64) -> &[Member<K>] {
        &self.snapshots[self.snapshots.partition_point(|member| member.number < number)..]
    }
}

/// Who of `members`, from the younger to the older, must be given a word that nobody younger keeps
/// any more: the first that lives, if neither it nor a dying one before it has that page already.
/// The origin's slot is locked.
fn receiver<'a, K: Kin + 'a>(
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

/// Moves the word of a slot, which is locked or was just taken out under the origin's lock, to an
/// empty slot of a snapshot.
fn hand_over<K: Kin>(kin: &K, from: &K::Layer, to: &K::Layer, slot: u64, word: Word) -> Result<()> {
    let guard = K::table(to).leaf_or_new(slot)?.lock(slot);
    debug_assert_eq!(guard.word(), Word::EMPTY, "a snapshot's page is set once");
    let new = match word {
        Word::EMPTY => Word::BASE,
        // It belongs to no batch any more.
        _ if word.is_picked() => word.unpicked(kin.now()),
        _ => word,
    };
    if let Some(object) = word.object() {
        kin.set_owner(object, to, slot);
    }
    guard.publish(new);
    kin.account(from, word, Word::EMPTY);
    kin.account(to, Word::EMPTY, new);
    Ok(())
}

/// Frees what a leaf of a layer holds that nobody uses any more. Returns whether it freed anything,
/// and whether something is left that is on its way from the backing device.
pub fn free_leaf<K: Kin>(kin: &K, layer: &K::Layer, start: u64) -> (bool, bool) {
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
        kin.account(layer, word, Word::EMPTY);
        kin.free(word);
        freed = true;
    }
    (freed, left)
}

// ---- reads --------------------------------------------------------------------------------------

impl<K: Kin> View<K> {
    /// The slot of a page that the device's own layer holds, locked.
    #[inline]
    pub fn own_page(&self, slot: u64) -> Option<SlotGuard<'_>> {
        let leaf = K::table(&self.layer).leaf(slot)?;
        let holds = |word: Word| !matches!(word.kind(), Kind::Empty | Kind::Base);
        if !holds(leaf.peek(slot)) {
            return None;
        }
        Some(leaf.lock(slot)).filter(|guard| holds(guard.word()))
    }

    /// Whether a snapshot knows that a page is the base's. That does not change as long as there is
    /// a snapshot.
    fn is_base(&self, slot: u64) -> bool {
        K::table(&self.layer).leaf(slot).is_some_and(|leaf| leaf.peek(slot).kind() == Kind::Base)
    }

    /// Hands the page of a slot to `found`, locked in the layer that holds it; `None` where that is
    /// no layer of this chain, and the page is what lies below.
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
        for member in list.from(*number) {
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

    /// How many of the pages `[slot, end)` certainly lie below, from the first one on.
    pub fn run_of_parent(&self, pin: &Pin<'_>, slot: u64, end: u64) -> u64 {
        let table = match &self.role {
            Role::Live { .. } => K::table(&self.layer),
            // What a snapshot has came from its origin.
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

impl<K: Kin> View<K> {
    /// Whether writers are held up.
    #[inline]
    pub fn is_frozen(&self) -> bool {
        matches!(self.role, Role::Live { frozen: true, .. })
    }

    /// Whether what a locked slot of the origin holds must move to a snapshot before it changes.
    /// It is noted that it changes: where it need not move it may be overwritten in its place.
    #[inline]
    pub fn must_preserve(&self, slot: u64) -> bool {
        if slot % 64 == 63 && mutants::on(Mutant::OriginForgetsSnapshot) {
            return false;
        }
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => {
                list.note(slot);
                receiver(list.snapshots.iter().rev(), slot).is_some()
            }
            _ => false,
        }
    }

    /// Has what a locked slot holds move to the snapshot that needs it. Returns what is left to be
    /// freed.
    #[inline]
    fn preserve(&self, kin: &K, slot: u64, held: Word) -> Result<Word> {
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => {
                list.note(slot);
                match receiver(list.snapshots.iter().rev(), slot) {
                    Some(to) => {
                        hand_over(kin, &self.layer, to, slot, held)?;
                        if held != Word::EMPTY {
                            kin.went_over(&self.layer);
                        }
                        Ok(Word::EMPTY)
                    }
                    None => Ok(held),
                }
            }
            _ => Ok(held),
        }
    }

    /// Puts another word into a locked slot of the live device; what it held goes to the snapshot
    /// that needs it, or is freed. An error leaves the slot as it was, and `new` to the caller.
    #[inline]
    pub fn replace(&self, kin: &K, slot: u64, guard: SlotGuard<'_>, new: Word) -> Result<()> {
        self.exchange(kin, slot, guard.word(), new, || guard.publish(new))
    }

    /// As [`replace`](Self::replace), of a slot that `held` this word (before it departed, if it is
    /// in flight) and is unlocked by `publish`.
    #[inline]
    pub fn exchange<R>(
        &self,
        kin: &K,
        slot: u64,
        held: Word,
        new: Word,
        publish: impl FnOnce() -> R,
    ) -> Result<R> {
        let left = self.preserve(kin, slot, held)?;
        let published = publish();
        kin.free(left);
        kin.account(&self.layer, left, new);
        Ok(published)
    }
}
