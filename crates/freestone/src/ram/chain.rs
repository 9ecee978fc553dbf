//! Chains: a live device and its snapshots, and who of them holds a page.
//!
//! A snapshot is a layer that begins empty. An empty slot of it means "as the next younger one", and past the youngest
//! "as the origin". Before the origin's slot changes, what it holds *goes over* to the youngest snapshot, if neither that one nor
//! a removed one before it has anything there: one word moves, the object stays where it is. An origin's slot that is
//! empty goes over as [`Word::BASE`].
//!
//! # Protocol
//! * Words go from a slot of one layer to the same slot of another only under the origin's slot lock. So under it the whole
//!   chain stands still, but for what happens to an object where it is (it moves in the pool, it is spilled).
//! * A reader of a snapshot looks at the snapshot's own slot; where that is empty, it locks the origin's slot and looks
//!   again from the snapshot to the origin. Where the origin has no leaf nobody has ever written there.
//! * A snapshot begins in three steps: writers are held up (the origin's view is swapped for one that says so, which
//!   waits for the pins of those that are at work), the list of snapshots is swapped, writers go on. No page lock is taken,
//!   and no thread waits: a write that is tried meanwhile would block, one that is submitted is held.
//! * A removed snapshot is *dying*: nothing goes over to it any more, what it has goes to the next older one that lives,
//!   slot by slot, in the background; older ones read through it until then. Where an older one that is dying, too, has the
//!   page, that is what is read, and the younger one's is freed.
//!
//! Lock order: a chain's `state`, then `held`; the origin's slot; then one slot of a snapshot at a time. A fork's slot comes before
//! those of the chain that it is a fork of.

use std::sync::{Arc, Weak};

use super::family::Shared;
use super::job::Job;
use super::layer::{Layer, stored};
use super::through::Below;
use super::{Inner, Ram, SetupError};
use crate::device::Result;
use crate::held::Held;
use crate::moment::{NotInTime, Pending};
use crate::mutants::{self, Mutant};
use crate::pin::{Pin, Swap};
use crate::slot::{Kind, SlotGuard, Word};
use crate::sync::{Instant, Mutex};

/// What a device is for its requests at one time.
pub(super) struct View {
    /// Its own slots.
    pub layer: Arc<Layer>,
    pub below: Below,
    pub role: Role,
}

pub(super) enum Role {
    /// A disk or fork, with what lives of its snapshots.
    Live { snapshots: Option<Arc<List>>, frozen: bool },
    /// A snapshot: number `number` of its chain.
    Snapshot { chain: Arc<Chain>, number: u64 },
}

/// The layers of a chain at one time.
pub(super) struct List {
    pub origin: Arc<Layer>,
    /// Oldest first.
    pub snapshots: Vec<Member>,
}

#[derive(Clone)]
pub(super) struct Member {
    /// Counts up within the chain.
    pub number: u64,
    pub layer: Arc<Layer>,
    pub dying: bool,
}

impl List {
    /// The members from `number` on to the youngest.
    fn from(&self, number: u64) -> &[Member] {
        &self.snapshots[self.snapshots.partition_point(|member| member.number < number)..]
    }
}

/// Who of `members`, from the younger to the older, must be given a word that nobody younger keeps any more: the first that
/// lives, if neither it nor a dying one before it has that page already. The origin's slot is locked.
fn receiver<'a>(members: impl Iterator<Item = &'a Member>, slot: u64) -> Option<&'a Layer> {
    for member in members {
        if member.layer.table().leaf(slot).is_some_and(|leaf| leaf.peek(slot) != Word::EMPTY) {
            return None;
        }
        if !member.dying {
            return Some(&member.layer);
        }
    }
    None
}

/// See the module.
pub(super) struct Chain {
    /// The origin's layer's.
    pub id: u32,
    list: Swap<List>,
    below: Below,
    state: Mutex<State>,
    /// Writers' requests, shut while they are held up.
    held: Held<(Ram, Job)>,
}

struct State {
    origin: Arc<Layer>,
    /// The live device; nobody's once that is gone or has another layer.
    device: Option<Weak<Inner>>,
    snapshots: Vec<Member>,
    next_number: u64,
    /// Snapshots that are beginning: writers wait.
    freezes: u32,
}

impl State {
    fn list(&self) -> List {
        List { origin: Arc::clone(&self.origin), snapshots: self.snapshots.clone() }
    }

    /// The place of a snapshot among the others.
    fn place(&self, number: u64) -> Option<usize> {
        self.snapshots.binary_search_by_key(&number, |member| member.number).ok()
    }

    /// Whether nobody needs the origin's layer.
    fn is_unused(&self) -> bool {
        self.device.is_none() && self.snapshots.is_empty() && self.freezes == 0
    }
}

impl Chain {
    /// A live device's chain, without snapshots.
    pub fn new(origin: Arc<Layer>, below: Below) -> Arc<Self> {
        let list = List { origin: Arc::clone(&origin), snapshots: Vec::new() };
        Arc::new(Self {
            id: origin.id(),
            list: Swap::new(Box::new(list)),
            below,
            state: Mutex::new(State {
                origin,
                device: None,
                snapshots: Vec::new(),
                next_number: 0,
                freezes: 0,
            }),
            held: Held::new(),
        })
    }

    /// The view of the live device, and which device it is from now on.
    pub fn first_view(&self, device: Weak<Inner>) -> View {
        let mut state = self.state.lock();
        state.device = Some(device);
        self.live_view(&state)
    }

    fn live_view(&self, state: &State) -> View {
        let snapshots = if state.snapshots.is_empty() { None } else { Some(Arc::new(state.list())) };
        View {
            layer: Arc::clone(&state.origin),
            below: self.below.clone(),
            role: Role::Live { snapshots, frozen: state.freezes > 0 },
        }
    }

    /// Has requests see what the state says. The device is for the caller to drop, with the state unlocked: it may be the
    /// last handle.
    #[must_use]
    fn publish(&self, state: &State) -> Option<Arc<Inner>> {
        self.list.replace(Box::new(state.list()));
        self.publish_live(state)
    }

    #[must_use]
    fn publish_live(&self, state: &State) -> Option<Arc<Inner>> {
        let device = state.device.as_ref().and_then(Weak::upgrade)?;
        device.view.replace(Box::new(self.live_view(state)));
        Some(device)
    }

    /// Returns when no write is under way any more; new ones wait.
    pub fn freeze(&self) {
        let mut state = self.state.lock();
        state.freezes += 1;
        if state.device.is_some() {
            self.held.shut();
        }
        let device = self.publish_live(&state);
        drop(state);
        drop(device);
    }

    /// Adds a snapshot, while writers are held up. Returns its view.
    pub fn attach(self: &Arc<Self>, layer: Arc<Layer>) -> View {
        let mut state = self.state.lock();
        debug_assert!(state.freezes > 0);
        let number = state.next_number;
        state.next_number += 1;
        state.snapshots.push(Member { number, layer: Arc::clone(&layer), dying: false });
        let device = self.publish(&state);
        drop(state);
        drop(device);
        View { layer, below: self.below.clone(), role: Role::Snapshot { chain: Arc::clone(self), number } }
    }

    /// Writers go on.
    pub fn thaw(&self) {
        let mut state = self.state.lock();
        state.freezes -= 1;
        let device = self.publish_live(&state);
        let held = if state.freezes == 0 { self.held.open() } else { Vec::new() };
        drop(state);
        carry_on(held);
        drop(device);
    }

    /// The request goes on when writers may. Returned: they may now.
    pub fn hold(&self, ram: &Ram, job: Job) -> Option<Job> {
        self.held.hold((ram.clone(), job)).map(|(_, job)| job)
    }

    /// The live device is gone: its slots change no more. True: nobody needs them.
    pub fn abandon(&self, family: &Shared) -> bool {
        self.leave(family, || ())
    }

    /// The live device goes to another chain: its slots change no more here. True: nobody needs them.
    pub fn abandon_for(&self, family: &Shared, other: &Self, device: &Arc<Inner>) -> bool {
        let view = Box::new(other.first_view(Arc::downgrade(device)));
        // Under the state: until writers have left the view none of the snapshots can be taken for passed on.
        self.leave(family, || drop(device.view.replace(view)))
    }

    fn leave(&self, family: &Shared, away: impl FnOnce()) -> bool {
        let mut state = self.state.lock();
        away();
        state.device = None;
        state.origin.set_loose(family);
        let unused = state.is_unused();
        let held = self.held.open();
        drop(state);
        carry_on(held);
        unused
    }

    /// A snapshot's device is gone. Returns its layer, whose content is now to be [passed on](Self::pass_on).
    pub fn doom(&self, number: u64) -> Option<Arc<Layer>> {
        let mut state = self.state.lock();
        let at = state.place(number)?;
        state.snapshots[at].dying = true;
        let layer = Arc::clone(&state.snapshots[at].layer);
        let device = self.publish(&state);
        drop(state);
        drop(device);
        Some(layer)
    }

    /// Gives what a dying snapshot has in the slots `[start, end)` of one leaf to the snapshot that reads it, or frees it.
    /// Returns whether something is left that is on its way from the backing device. For the cleaner only: the chain's
    /// members do not change meanwhile.
    pub fn pass_on(&self, family: &Shared, number: u64, start: u64, end: u64) -> Result<bool> {
        let (origin, from, older) = {
            let state = self.state.lock();
            let Some(at) = state.place(number) else { return Ok(false) };
            let older = state.snapshots[..at].to_vec();
            (Arc::clone(&state.origin), Arc::clone(&state.snapshots[at].layer), older)
        };
        let Some(leaf) = from.table().leaf(start) else { return Ok(false) };
        let heir = older.iter().rev().find(|member| !member.dying);
        if let Some(heir) = heir {
            // Nothing can fail once a word is in no slot.
            heir.layer.table().leaf_or_new(start)?;
        }
        let mut left = false;
        for slot in start..end {
            if leaf.peek(slot) == Word::EMPTY {
                continue;
            }
            // What is here came from there, so there is a leaf.
            let Some(origin) = origin.table().leaf(slot) else { continue };
            let still = origin.lock(slot);
            let guard = leaf.lock(slot);
            let word = guard.word();
            match word.kind() {
                Kind::Empty => {}
                Kind::InFlight => left = true,
                _ => {
                    guard.publish(Word::EMPTY);
                    if let Some(heir) = receiver(older.iter().rev(), slot) {
                        family.hand_over(&from, heir, slot, word)?;
                    } else {
                        from.account(family, word, Word::EMPTY);
                        family.release(word);
                    }
                }
            }
            drop(still);
        }
        Ok(left)
    }

    /// A dying snapshot is empty. Returns its layer, and the origin's, if nobody needs that any more.
    pub fn bury(&self, number: u64) -> (Option<Arc<Layer>>, Option<Arc<Layer>>) {
        let mut state = self.state.lock();
        let Some(at) = state.place(number) else { return (None, None) };
        let member = state.snapshots.remove(at);
        let device = self.publish(&state);
        let origin = state.is_unused().then(|| Arc::clone(&state.origin));
        drop(state);
        drop(device);
        (Some(member.layer), origin)
    }

    /// What lies below, for whoever is the last to have the chain.
    pub fn into_below(self) -> Below {
        self.below
    }

    /// How many snapshots live.
    pub fn snapshots(&self) -> usize {
        self.state.lock().snapshots.iter().filter(|member| !member.dying).count()
    }
}

/// On the families' own threads: who thaws has others to thaw.
fn carry_on(held: Vec<(Ram, Job)>) {
    for (ram, job) in held {
        Arc::clone(&ram.0.family.keeper).resume(ram, job);
    }
}

impl View {
    /// The slot of a page that the device's own layer holds, locked.
    #[inline]
    pub fn own_page(&self, slot: u64) -> Option<SlotGuard<'_>> {
        let leaf = self.layer.table().leaf(slot)?;
        let holds = |word: Word| !matches!(word.kind(), Kind::Empty | Kind::Base);
        if !holds(leaf.peek(slot)) {
            return None;
        }
        Some(leaf.lock(slot)).filter(|guard| holds(guard.word()))
    }

    /// Whether a snapshot knows that a page is the base's. That does not change as long as there is a snapshot.
    fn is_base(&self, slot: u64) -> bool {
        self.layer.table().leaf(slot).is_some_and(|leaf| leaf.peek(slot).kind() == Kind::Base)
    }

    /// Hands the page of a slot to `found`, locked in the layer that holds it; `None` where that is no layer of this
    /// chain, and the page is what lies below.
    pub fn with_page<R>(
        &self,
        pin: &Pin<'_>,
        slot: u64,
        found: impl FnOnce(Option<(&Layer, SlotGuard<'_>)>) -> R,
    ) -> R {
        if let Some(guard) = self.own_page(slot) {
            return found(Some((&self.layer, guard)));
        }
        if self.is_base(slot) {
            return found(None);
        }
        let Role::Snapshot { chain, number } = &self.role else { return found(None) };
        let list = chain.list.load(pin);
        let Some(leaf) = list.origin.table().leaf(slot) else { return found(None) };
        let origin = leaf.lock(slot);
        for member in list.from(*number) {
            if let Some(leaf) = member.layer.table().leaf(slot) {
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
    pub fn run_below(&self, pin: &Pin<'_>, slot: u64, end: u64) -> u64 {
        let table = match &self.role {
            Role::Live { .. } => self.layer.table(),
            // What a snapshot has came from its origin.
            Role::Snapshot { chain, .. } => chain.list.load(pin).origin.table(),
        };
        let present = table.next_present(slot, end).unwrap_or(end);
        if present > slot || matches!(self.role, Role::Snapshot { .. }) {
            return present - slot;
        }
        let Some(leaf) = table.leaf(slot) else { return 0 };
        let stop = super::next_multiple(slot, crate::slot::LEAF_SLOTS).min(end);
        (slot..stop).take_while(|&slot| leaf.peek(slot) == Word::EMPTY).count() as u64
    }

    /// Whether writers are held up.
    #[inline]
    pub fn is_frozen(&self) -> bool {
        matches!(self.role, Role::Live { frozen: true, .. })
    }

    /// Whether what the origin's slot holds must go over to a snapshot before it changes.
    #[inline]
    pub fn must_preserve(&self, slot: u64) -> bool {
        if slot % 64 == 63 && mutants::on(Mutant::OriginForgetsSnapshot) {
            return false;
        }
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => receiver(list.snapshots.iter().rev(), slot).is_some(),
            _ => false,
        }
    }

    /// Before a locked slot changes: has what it holds go over to the snapshot that needs it. Returns what is left for
    /// the caller to free.
    #[inline]
    pub fn preserve(&self, family: &Shared, slot: u64, held: Word) -> Result<Word> {
        match &self.role {
            Role::Live { snapshots: Some(list), .. } => match receiver(list.snapshots.iter().rev(), slot) {
                Some(to) => {
                    family.hand_over(&self.layer, to, slot, held)?;
                    self.layer.count(stored::HANDED_OVER, i64::from(held != Word::EMPTY));
                    Ok(Word::EMPTY)
                }
                None => Ok(held),
            },
            _ => Ok(held),
        }
    }
}

impl Shared {
    /// Moves the word of a slot, which is locked or was just taken out under the origin's lock, to an empty slot of a snapshot.
    fn hand_over(&self, from: &Layer, to: &Layer, slot: u64, word: Word) -> Result<()> {
        let guard = to.table().leaf_or_new(slot)?.lock(slot);
        debug_assert_eq!(guard.word(), Word::EMPTY, "a snapshot's page is set once");
        let new = match word {
            Word::EMPTY => Word::BASE,
            // It belongs to no batch any more.
            _ if word.is_picked() => word.unpicked(self.ages.now()),
            _ => word,
        };
        if let Some(location) = word.object() {
            self.pool.set_owner(location, to.owner(slot));
        }
        guard.publish(new);
        from.account(self, word, Word::EMPTY);
        to.account(self, Word::EMPTY, new);
        Ok(())
    }
}

/// A snapshot that is ready to begin.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
}

impl PendingSnapshot {
    pub(super) fn new(origin: Ram) -> std::result::Result<Self, SetupError> {
        let layer = origin.0.family.layers.make(&origin.0.family, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None })
    }

    /// The snapshot, once it has begun.
    ///
    /// # Panics
    /// If it has not: [`moment::take`](crate::moment::take) comes first.
    pub fn into_snapshot(mut self) -> Ram {
        match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => unreachable!("into_snapshot comes after moment::take"),
        }
    }
}

impl Pending for PendingSnapshot {
    /// Waits for pins alone, under which nothing waits.
    fn freeze(&mut self, _: Instant) -> std::result::Result<(), NotInTime> {
        let chain = self.origin.0.freeze_chain();
        self.chain = Some(chain);
        Ok(())
    }

    fn attach(&mut self) {
        if let Some(chain) = self.chain.as_ref().filter(|_| self.snapshot.is_none()) {
            self.origin.0.family.layers.join(&self.layer, chain.id);
            let view = chain.attach(Arc::clone(&self.layer));
            self.snapshot = Some(self.origin.0.snapshot_device(view));
        }
    }

    fn thaw(&mut self) {
        if let Some(chain) = self.chain.take() {
            chain.thaw();
        }
    }
}

impl Drop for PendingSnapshot {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            chain.thaw();
        }
        // One that has not begun.
        if !self.layer.is_in_chain() {
            super::retire::layer(&self.origin.0.family, Arc::clone(&self.layer));
        }
    }
}
