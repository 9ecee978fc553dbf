//! How snapshots of a chain begin and end, and how a device goes from one chain to another.

// loom has no weak handles. That of a device is for finding its view only.
use std::sync::{Arc as Handle, Weak};

use super::{Dirty, Kin, List, Member, Role, View, hand_over, receiver};
use crate::device::Result;
use crate::held::Held;
use crate::pin::{Pin, Swap};
use crate::slot::{Kind, Word};
use crate::sync::{Arc, Mutex};

/// See [`chain`](super).
///
/// Lock order: `state`, then `held`. `state` is held while views and lists are swapped, so across
/// waits for pins: no request takes it.
pub struct Chain<K: Kin> {
    list: Swap<List<K>>,
    parent: K::Parent,
    state: Mutex<MembersState<K>>,
    /// Writers' requests, shut while they are held up.
    held: Held<K::Job>,
}

struct MembersState<K: Kin> {
    origin: Arc<K::Layer>,
    /// The live device; nobody's once that is gone or has another layer.
    device: Option<Weak<K::Device>>,
    snapshots: Vec<Member<K>>,
    next_number: u64,
    /// Snapshots that are beginning: writers wait.
    freezes: u32,
    /// Where it is noted what changes.
    dirty: Option<Arc<Dirty>>,
    /// Those who [supply](Chain::supply) pages.
    suppliers: u32,
}

/// What a live device leaves that goes: the origin's layer, if nobody needs it, and what was held
/// up.
type Left<K> = (Option<Arc<<K as Kin>::Layer>>, Vec<<K as Kin>::Job>);

impl<K: Kin> MembersState<K> {
    fn list(&self) -> List<K> {
        List {
            origin: Arc::clone(&self.origin),
            snapshots: self.snapshots.clone(),
            dirty: self.dirty.clone(),
        }
    }

    /// The place of a snapshot among the others.
    fn place(&self, number: u64) -> Option<usize> {
        self.snapshots.binary_search_by_key(&number, |member| member.number).ok()
    }

    /// The origin's layer, if nobody needs it.
    fn unused_origin(&self) -> Option<Arc<K::Layer>> {
        let unused = !self.is_wanted() && self.freezes == 0 && self.suppliers == 0;
        unused.then(|| Arc::clone(&self.origin))
    }

    /// Whether a device reads it.
    fn is_wanted(&self) -> bool {
        self.device.is_some() || !self.snapshots.is_empty()
    }
}

impl<K: Kin> Chain<K> {
    /// A live device's chain, without snapshots.
    pub fn new(origin: Arc<K::Layer>, parent: K::Parent) -> Arc<Self> {
        let list = List { origin: Arc::clone(&origin), snapshots: Vec::new(), dirty: None };
        Arc::new(Self {
            list: Swap::new(Box::new(list)),
            parent,
            state: Mutex::new(MembersState {
                origin,
                device: None,
                snapshots: Vec::new(),
                next_number: 0,
                freezes: 0,
                dirty: None,
                suppliers: 0,
            }),
            held: Held::default(),
        })
    }

    /// The origin's layer.
    pub fn origin(&self) -> Arc<K::Layer> {
        Arc::clone(&self.state.lock().origin)
    }

    /// What readers of snapshots go through.
    #[inline]
    pub(super) fn list<'a>(&'a self, pin: &'a Pin<'_>) -> &'a List<K> {
        self.list.load(pin)
    }

    /// The view of the live device, and which device it is from now on.
    pub fn first_view(&self, device: Weak<K::Device>) -> View<K> {
        let mut state = self.state.lock();
        state.device = Some(device);
        self.live_view(&state)
    }

    fn live_view(&self, state: &MembersState<K>) -> View<K> {
        let is_bare = state.snapshots.is_empty() && state.dirty.is_none();
        let snapshots = if is_bare { None } else { Some(Arc::new(state.list())) };
        View {
            layer: Arc::clone(&state.origin),
            parent: self.parent.clone(),
            role: Role::Live { snapshots, frozen: state.freezes > 0 },
        }
    }

    /// Has requests see what the state says. The device is for the caller to drop, with the state
    /// unlocked: it may be the last handle.
    #[must_use]
    fn publish(&self, state: &MembersState<K>) -> Option<Handle<K::Device>> {
        self.list.replace(Box::new(state.list()));
        self.publish_live(state)
    }

    #[must_use]
    fn publish_live(&self, state: &MembersState<K>) -> Option<Handle<K::Device>> {
        let device = state.device.as_ref().and_then(Weak::upgrade)?;
        K::view(&device).replace(Box::new(self.live_view(state)));
        Some(device)
    }

    // ---- a snapshot begins ----------------------------------------------------------------------

    /// Returns when no write is under way any more; new ones wait.
    fn freeze(&self) {
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
    pub fn attach(this: &Arc<Self>, layer: Arc<K::Layer>) -> View<K> {
        let mut state = this.state.lock();
        debug_assert!(state.freezes > 0);
        let number = state.next_number;
        state.next_number += 1;
        state.snapshots.push(Member { number, layer: Arc::clone(&layer), dying: false });
        let device = this.publish(&state);
        drop(state);
        drop(device);
        View { layer, parent: this.parent.clone(), role: Role::Snapshot { chain: Arc::clone(this), number } }
    }

    /// Writers go on. Returned is what was held up, for the caller to carry on.
    #[must_use]
    pub fn thaw(&self) -> Vec<K::Job> {
        let mut state = self.state.lock();
        state.freezes -= 1;
        let device = self.publish_live(&state);
        let held = if state.freezes == 0 { self.held.open() } else { Vec::new() };
        drop(state);
        drop(device);
        held
    }

    /// The request goes on when writers may. Returned: they may now.
    pub fn hold(&self, job: K::Job) -> Option<K::Job> {
        self.held.hold(job)
    }

    // ---- what changes is noted ------------------------------------------------------------------

    /// From now on it is noted here what of the live device changes, or nowhere. Returns where it
    /// was until now: writers that were under way have noted all they changed. Between
    /// [`Current::freeze`] and [`attach`](Self::attach) this is of the snapshot's moment.
    pub fn note_changes(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>> {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.dirty, dirty);
        let device = self.publish_live(&state);
        drop(state);
        drop(device);
        before
    }

    /// Where it is noted what changes.
    pub fn dirty(&self) -> Option<Arc<Dirty>> {
        self.state.lock().dirty.clone()
    }

    // ---- pages from below -----------------------------------------------------------------------

    /// From now on, until [`end_supply`](Self::end_supply), pages may be [supplied](Self::supply):
    /// the origin's layer stays.
    pub fn begin_supply(&self) {
        self.state.lock().suppliers += 1;
    }

    /// No more pages are supplied. Returns the origin's layer, if nobody needs it.
    #[must_use]
    pub fn end_supply(&self) -> Option<Arc<K::Layer>> {
        let mut state = self.state.lock();
        state.suppliers -= 1;
        state.unused_origin()
    }

    /// Whether a device reads what is supplied.
    pub fn is_wanted(&self) -> bool {
        self.state.lock().is_wanted()
    }

    /// Puts a page that lay below the chain until now, and whose object is noted as the origin's,
    /// where it belongs: into the origin's slot if that is empty, else into that of the snapshot
    /// which says that it lies below. False: writers and removals have left nobody who needs it,
    /// and `new` is the caller's. As long as pages are supplied the live device covers what it
    /// empties, so an empty slot says that nobody wrote there.
    pub fn supply(&self, kin: &K, pin: &Pin<'_>, slot: u64, new: Word) -> Result<bool> {
        let list = self.list.load(pin);
        let guard = K::table(&list.origin).leaf_or_new(slot)?.lock(slot);
        if guard.word() == Word::EMPTY {
            guard.publish(new);
            kin.account(&list.origin, Word::EMPTY, new);
            return Ok(true);
        }
        for member in &list.snapshots {
            let Some(leaf) = K::table(&member.layer).leaf(slot) else { continue };
            let own = leaf.lock(slot);
            if own.word() == Word::BASE {
                if let Some(object) = new.object() {
                    kin.set_owner(object, &member.layer, slot);
                }
                own.publish(new);
                kin.account(&member.layer, Word::BASE, new);
                return Ok(true);
            }
        }
        Ok(false)
    }

    // ---- the device goes ------------------------------------------------------------------------

    /// The live device is gone: its slots change no more. Returns the origin's layer, if nobody
    /// needs it, and what was held up, for the caller to carry on.
    #[must_use]
    pub fn abandon(&self, kin: &K) -> Left<K> {
        self.leave(kin, || ())
    }

    /// The live device goes to another chain: its slots change no more here. Else as
    /// [`abandon`](Self::abandon).
    fn abandon_for(&self, kin: &K, other: &Self, device: &Handle<K::Device>) -> Left<K> {
        let view = Box::new(other.first_view(Handle::downgrade(device)));
        // Under the state: until writers have left the view none of the snapshots can be taken for
        // passed on.
        self.leave(kin, || drop(K::view(device).replace(view)))
    }

    fn leave(&self, kin: &K, away: impl FnOnce()) -> Left<K> {
        let mut state = self.state.lock();
        away();
        state.device = None;
        kin.set_loose(&state.origin);
        (state.unused_origin(), self.held.open())
    }

    // ---- a snapshot ends ------------------------------------------------------------------------

    /// A snapshot's device is gone. Returns its layer, whose content is now to be [passed
    /// on](Self::pass_on).
    pub fn begin_delete(&self, number: u64) -> Option<Arc<K::Layer>> {
        let mut state = self.state.lock();
        let at = state.place(number)?;
        state.snapshots[at].dying = true;
        let layer = Arc::clone(&state.snapshots[at].layer);
        let device = self.publish(&state);
        drop(state);
        drop(device);
        Some(layer)
    }

    /// Gives what a dying snapshot has in the slots `[start, end)` of one leaf to the snapshot that
    /// reads it, or frees it. Returns whether something is left that is on its way from the backing
    /// device. For the cleaner only: no other member ends meanwhile.
    pub fn pass_on(&self, kin: &K, number: u64, start: u64, end: u64) -> Result<bool> {
        let (origin, from, older) = {
            let state = self.state.lock();
            let Some(at) = state.place(number) else { return Ok(false) };
            let older = state.snapshots[..at].to_vec();
            (Arc::clone(&state.origin), Arc::clone(&state.snapshots[at].layer), older)
        };
        let Some(leaf) = K::table(&from).leaf(start) else { return Ok(false) };
        let heir = older.iter().rev().find(|member| !member.dying);
        if let Some(heir) = heir {
            // Nothing can fail once a word is in no slot.
            K::table(&heir.layer).leaf_or_new(start)?;
        }
        let mut left = false;
        for slot in start..end {
            if leaf.peek(slot) == Word::EMPTY {
                continue;
            }
            // A snapshot's pages come from its origin, so the origin's leaf exists.
            let Some(origin) = K::table(&origin).leaf(slot) else { continue };
            let still = origin.lock(slot);
            let guard = leaf.lock(slot);
            let word = guard.word();
            match word.kind() {
                Kind::Empty => {}
                Kind::InFlight => left = true,
                _ => {
                    guard.publish(Word::EMPTY);
                    if let Some(heir) = receiver(older.iter().rev(), slot) {
                        hand_over(kin, &from, heir, slot, word)?;
                    } else {
                        kin.account(&from, word, Word::EMPTY);
                        kin.free(word);
                    }
                }
            }
            drop(still);
        }
        Ok(left)
    }

    /// A dying snapshot is empty. Returns the layers that nobody needs any more: its own, and the
    /// origin's, if it was the last to need that.
    pub fn unlink(&self, number: u64) -> Vec<Arc<K::Layer>> {
        let mut state = self.state.lock();
        let Some(at) = state.place(number) else { return Vec::new() };
        let member = state.snapshots.remove(at);
        let device = self.publish(&state);
        let origin = state.unused_origin();
        drop(state);
        drop(device);
        [member.layer].into_iter().chain(origin).collect()
    }

    /// What lies below, for whoever is the last to have the chain.
    pub fn into_parent(self) -> K::Parent {
        self.parent
    }

    /// How many snapshots live.
    pub fn snapshots(&self) -> usize {
        self.state.lock().snapshots.iter().filter(|member| !member.dying).count()
    }
}

/// The chain of a device, which for a live one changes when that is rewound.
///
/// Lock order: before the chain's `state`; else for a look.
pub struct Current<K: Kin>(Mutex<Arc<Chain<K>>>);

impl<K: Kin> Current<K> {
    /// Begins with this one.
    pub fn new(chain: Arc<Chain<K>>) -> Self {
        Self(Mutex::new(chain))
    }

    /// The present one.
    pub fn get(&self) -> Arc<Chain<K>> {
        Arc::clone(&self.0.lock())
    }

    /// Holds up writers, until the chain is thawed, which is not exchanged meanwhile without that
    /// being known to it.
    pub fn freeze(&self) -> Arc<Chain<K>> {
        let chain = self.0.lock();
        chain.freeze();
        Arc::clone(&chain)
    }

    /// A live device begins anew, in an empty chain. Returns what the former chain
    /// [leaves](Chain::abandon).
    #[must_use]
    pub fn rewind(&self, kin: &K, new: &Arc<Chain<K>>, device: &Handle<K::Device>) -> Left<K> {
        let mut chain = self.0.lock();
        let old = std::mem::replace(&mut *chain, Arc::clone(new));
        // All that the device holds is another thing from now on.
        if old.dirty().is_some() {
            new.state.lock().dirty = Some(Arc::new(Dirty::everything()));
        }
        let left = old.abandon_for(kin, new, device);
        drop(chain);
        left
    }
}
