//! Adds snapshots to a chain and removes them, and moves a device to another chain.

// Devices are held by std's Arc, because loom has no weak references. A chain uses its device only to find
// the view.
use std::sync::{Arc as Handle, Weak};

use super::{ChainFamily, Dirty, List, Member, Role, View, move_word, receiver};
use crate::device::Result;
use crate::held_requests::HeldRequests;
use crate::kill_points::{self, KillPoint};
use crate::pin::{Pin, Swap};
use crate::slot::{Kind, Word};
use crate::sync::{Arc, Mutex};

/// A live device and its snapshots; see [`chain`](super).
///
/// Lock order: `state`, then `held`. `state` is held while views and lists are replaced, that is, while
/// waiting for pins, so requests never take this lock.
pub struct Chain<K: ChainFamily> {
    list: Swap<List<K>>,
    parent: K::Parent,
    state: Mutex<MembersState<K>>,
    /// Write requests that are held while writers are frozen.
    held: HeldRequests<K::Job>,
}

struct MembersState<K: ChainFamily> {
    origin: Arc<K::Layer>,
    /// The live device; `None` after the device is gone or has moved to another chain.
    device: Option<Weak<K::Device>>,
    snapshots: Vec<Member<K>>,
    next_number: u64,
    /// Number of snapshots being taken. Unless zero, writers are frozen.
    freezes: u32,
    dirty: Option<Arc<Dirty>>,
    /// Number of active [suppliers](Chain::supply).
    suppliers: u32,
}

/// Parts left by a device that leaves a chain: the origin's layer if it is unused, and the held requests.
type DetachedParts<K> = (Option<Arc<<K as ChainFamily>::Layer>>, Vec<<K as ChainFamily>::Job>);

impl<K: ChainFamily> MembersState<K> {
    fn list(&self) -> List<K> {
        List {
            origin: Arc::clone(&self.origin),
            snapshots: self.snapshots.clone(),
            dirty: self.dirty.clone(),
        }
    }

    fn index_of(&self, number: u64) -> Option<usize> {
        self.snapshots.binary_search_by_key(&number, |member| member.number).ok()
    }

    /// Returns the origin's layer if no device, freeze or supplier uses it.
    fn unused_origin(&self) -> Option<Arc<K::Layer>> {
        let unused = !self.is_wanted() && self.freezes == 0 && self.suppliers == 0;
        unused.then(|| Arc::clone(&self.origin))
    }

    /// Returns true if the live device or a snapshot reads the origin.
    fn is_wanted(&self) -> bool {
        self.device.is_some() || !self.snapshots.is_empty()
    }
}

impl<K: ChainFamily> Chain<K> {
    /// Creates the chain of a live device, without snapshots.
    pub fn new(origin: Arc<K::Layer>, parent: K::Parent) -> Arc<Self> {
        Self::with_snapshots(origin, Vec::new(), parent)
    }

    /// Creates a chain whose snapshots exist already, given with their numbers in ascending order.
    pub fn with_snapshots(
        origin: Arc<K::Layer>,
        snapshots: Vec<(u64, Arc<K::Layer>)>,
        parent: K::Parent,
    ) -> Arc<Self> {
        let next_number = snapshots.last().map_or(0, |(number, _)| number + 1);
        let member = |(number, layer)| Member { number, layer, dying: false };
        let state = MembersState {
            origin,
            device: None,
            snapshots: snapshots.into_iter().map(member).collect(),
            next_number,
            freezes: 0,
            dirty: None,
            suppliers: 0,
        };
        Arc::new(Self {
            list: Swap::new(Box::new(state.list())),
            parent,
            state: Mutex::new(state),
            held: HeldRequests::default(),
        })
    }

    /// Returns the origin's layer.
    pub fn origin(&self) -> Arc<K::Layer> {
        Arc::clone(&self.state.lock().origin)
    }

    /// Returns the list of the origin and its snapshots that readers of snapshots use.
    #[inline]
    pub(super) fn list<'a>(&'a self, pin: &'a Pin<'_>) -> &'a List<K> {
        self.list.load(pin)
    }

    /// Sets the live device of the chain and returns the device's view.
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

    /// Publishes the state to requests. The caller must drop the returned device after unlocking the state,
    /// because this may be the last reference.
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

    // ---- taking a snapshot ------------------------------------------------------------------------

    /// Freezes new writes and waits for the writes in flight.
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

    /// Adds a snapshot while writers are frozen. Returns the snapshot's view.
    pub fn attach(this: &Arc<Self>, layer: Arc<K::Layer>) -> View<K> {
        let mut state = this.state.lock();
        debug_assert!(state.freezes > 0);
        let number = state.next_number;
        state.next_number += 1;
        state.snapshots.push(Member { number, layer: Arc::clone(&layer), dying: false });
        let device = this.publish(&state);
        drop(state);
        drop(device);
        Self::snapshot_view(this, layer, number)
    }

    /// Returns the view of the snapshot with this layer and number.
    pub fn snapshot_view(this: &Arc<Self>, layer: Arc<K::Layer>, number: u64) -> View<K> {
        View { layer, parent: this.parent.clone(), role: Role::Snapshot { chain: Arc::clone(this), number } }
    }

    /// Thaws writers. Returns the held requests, which the caller must continue.
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

    /// Holds a request while writers are frozen. Returns the request if writers are not frozen.
    pub fn hold(&self, request: K::Job) -> Option<K::Job> {
        self.held.hold(request)
    }

    // ---- recording changes ------------------------------------------------------------------------

    /// Replaces the record of changed pages. Returns the old record, to which all writers in flight have
    /// added their changes. Between [`CurrentChain::freeze`] and [`attach`](Self::attach) the switch is
    /// atomic with the snapshot.
    pub fn replace_dirty(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>> {
        let mut state = self.state.lock();
        let old = std::mem::replace(&mut state.dirty, dirty);
        let device = self.publish_live(&state);
        drop(state);
        drop(device);
        old
    }

    /// Returns the present record of changed pages, or `None` if changes are not recorded.
    pub fn dirty(&self) -> Option<Arc<Dirty>> {
        self.state.lock().dirty.clone()
    }

    // ---- pages supplied from the parent -----------------------------------------------------------

    /// Keeps the origin's layer, so that pages can be [supplied](Self::supply) until
    /// [`end_supply`](Self::end_supply).
    pub fn begin_supply(&self) {
        self.state.lock().suppliers += 1;
    }

    /// Ends the supply. Returns the origin's layer if it is unused now.
    #[must_use]
    pub fn end_supply(&self) -> Option<Arc<K::Layer>> {
        let mut state = self.state.lock();
        state.suppliers -= 1;
        state.unused_origin()
    }

    /// Returns true if the live device or a snapshot reads supplied pages.
    pub fn is_wanted(&self) -> bool {
        self.state.lock().is_wanted()
    }

    /// Stores a page of the parent, whose compressed object in the pool records the origin as its owner. The
    /// page goes into the origin's slot if that is empty, otherwise into the slot of the snapshot that refers
    /// to the parent. Returns false if no device needs the page any more; then the caller still owns `new`.
    ///
    /// While pages are supplied, the live device never empties a slot: a discarded page keeps a word that
    /// hides the parent's page. So an empty slot was never written.
    pub fn supply(&self, family: &K, pin: &Pin<'_>, slot: u64, new: Word) -> Result<bool> {
        let list = self.list.load(pin);
        let guard = K::table(&list.origin).leaf_or_new(slot)?.lock(slot);
        if guard.word() == Word::EMPTY {
            guard.publish(new);
            family.update_stats(&list.origin, Word::EMPTY, new);
            return Ok(true);
        }
        for member in &list.snapshots {
            let Some(leaf) = K::table(&member.layer).leaf(slot) else { continue };
            let own = leaf.lock(slot);
            if own.word() == Word::BASE {
                if let Some(object) = new.object() {
                    family.set_owner(object, &member.layer, slot);
                }
                own.publish(new);
                family.update_stats(&member.layer, Word::BASE, new);
                return Ok(true);
            }
        }
        Ok(false)
    }

    // ---- removing the device ----------------------------------------------------------------------

    /// Detaches the live device, whose slots do not change any more. Returns the origin's layer if it is
    /// unused now, and the held requests, which the caller must continue.
    #[must_use]
    pub fn abandon(&self, family: &K) -> DetachedParts<K> {
        self.detach_device(family, || ())
    }

    /// Moves the live device to another chain. Returns the same parts as [`abandon`](Self::abandon).
    fn move_device_to(&self, family: &K, other: &Self, device: &Handle<K::Device>) -> DetachedParts<K> {
        let view = Box::new(other.first_view(Handle::downgrade(device)));
        // The view is replaced under the state lock: no snapshot may be passed on until writers have left the
        // old view.
        self.detach_device(family, || drop(K::view(device).replace(view)))
    }

    fn detach_device(&self, family: &K, redirect: impl FnOnce()) -> DetachedParts<K> {
        let mut state = self.state.lock();
        redirect();
        state.device = None;
        family.mark_unused(&state.origin);
        (state.unused_origin(), self.held.open())
    }

    // ---- removing a snapshot ----------------------------------------------------------------------

    /// Marks a removed snapshot as dying. Returns the snapshot's layer, whose content must be [passed
    /// on](Self::pass_on), or `None` if the chain has no such snapshot.
    pub fn begin_delete(&self, number: u64) -> Option<Arc<K::Layer>> {
        let mut state = self.state.lock();
        let at = state.index_of(number)?;
        state.snapshots[at].dying = true;
        let layer = Arc::clone(&state.snapshots[at].layer);
        let device = self.publish(&state);
        drop(state);
        drop(device);
        Some(layer)
    }

    /// Moves the pages of a dying snapshot in the slots `[start, end)` of one leaf to the snapshot that reads
    /// them, or frees them. Returns true if slots in flight remain. Called only by the cleaner, so no other
    /// snapshot is unlinked meanwhile.
    pub fn pass_on(&self, family: &K, number: u64, start: u64, end: u64) -> Result<bool> {
        let (origin, from, older) = {
            let state = self.state.lock();
            let Some(at) = state.index_of(number) else { return Ok(false) };
            let older = state.snapshots[..at].to_vec();
            (Arc::clone(&state.origin), Arc::clone(&state.snapshots[at].layer), older)
        };
        let Some(leaf) = K::table(&from).leaf(start) else { return Ok(false) };
        let target = older.iter().rev().find(|member| !member.dying);
        if let Some(target) = target {
            // Allocates the leaf before the first slot is locked.
            K::table(&target.layer).leaf_or_new(start)?;
        }
        let mut has_flights = false;
        for slot in start..end {
            if leaf.peek(slot) == Word::EMPTY {
                continue;
            }
            // A snapshot's pages come from its origin, so the origin has the leaf.
            let Some(origin) = K::table(&origin).leaf(slot) else { continue };
            let origin_guard = origin.lock(slot);
            let guard = leaf.lock(slot);
            let word = guard.word();
            match word.kind() {
                Kind::Empty => {}
                Kind::InFlight => has_flights = true,
                _ => {
                    // The word is in its new slot before it leaves this one, so that it is always in a slot.
                    if let Some(target) = receiver(older.iter().rev(), slot) {
                        let moved = move_word(family, &from, target, slot, word)?;
                        guard.publish(Word::EMPTY);
                        drop(moved);
                        kill_points::pass(KillPoint::WordPassedOn);
                    } else {
                        guard.publish(Word::EMPTY);
                        family.update_stats(&from, word, Word::EMPTY);
                        family.free(word);
                    }
                }
            }
            drop(origin_guard);
        }
        Ok(has_flights)
    }

    /// Removes an empty dying snapshot. Returns the layers that are unused now: the snapshot's layer, and the
    /// origin's if this snapshot was its last user.
    pub fn unlink(&self, number: u64) -> Vec<Arc<K::Layer>> {
        let mut state = self.state.lock();
        let Some(at) = state.index_of(number) else { return Vec::new() };
        let member = state.snapshots.remove(at);
        let device = self.publish(&state);
        let origin = state.unused_origin();
        drop(state);
        drop(device);
        [member.layer].into_iter().chain(origin).collect()
    }

    /// Returns the parent of the chain. Called by the last owner.
    pub fn into_parent(self) -> K::Parent {
        self.parent
    }

    /// Returns the number of live snapshots.
    pub fn snapshots(&self) -> usize {
        self.state.lock().snapshots.iter().filter(|member| !member.dying).count()
    }
}

/// The present chain of a device. A rewind replaces the chain of a live device.
///
/// Lock order: taken before the chain's `state`. Otherwise held for a look-up only.
pub struct CurrentChain<K: ChainFamily>(Mutex<Arc<Chain<K>>>);

impl<K: ChainFamily> CurrentChain<K> {
    /// Creates the holder of a device's first chain.
    pub fn new(chain: Arc<Chain<K>>) -> Self {
        Self(Mutex::new(chain))
    }

    /// Returns the present chain.
    pub fn get(&self) -> Arc<Chain<K>> {
        Arc::clone(&self.0.lock())
    }

    /// Freezes writers until the returned chain is thawed. A concurrent rewind waits for the freeze to begin.
    pub fn freeze(&self) -> Arc<Chain<K>> {
        let chain = self.0.lock();
        chain.freeze();
        Arc::clone(&chain)
    }

    /// Moves a live device to a new, empty chain. Returns the parts that [remain](Chain::abandon) of the old
    /// chain.
    #[must_use]
    pub fn rewind(&self, family: &K, new: &Arc<Chain<K>>, device: &Handle<K::Device>) -> DetachedParts<K> {
        let mut chain = self.0.lock();
        let old = std::mem::replace(&mut *chain, Arc::clone(new));
        // After the rewind every page may differ from the recorded state.
        if old.dirty().is_some() {
            new.state.lock().dirty = Some(Arc::new(Dirty::everything()));
        }
        let left = old.move_device_to(family, new, device);
        drop(chain);
        left
    }
}
