//! loom models of a chain: the real protocol and slots, with page tables of a few slots, of which one page is
//! used.
//!
//! An object (a stored page) is modelled as a number. The models detect: reading a freed object, a double
//! free, a leak, a wrong owner record, and wrong page counts.
//!
//! Run with `cargo xtask models`.

mod background;
mod runs;
mod supply;

use std::sync::Arc as Handle;
use std::sync::atomic::{AtomicI64, AtomicU64 as StdAtomicU64};

use loom::thread;

use super::{Chain, ChainFamily, CurrentChain, Role, View, free_leaf};
use crate::pin::wait;
use crate::pin::{Pin, Swap, pinned};
use crate::slot::{Common, Flights, Kind, LEAF_SLOTS, SlotGuard, Table, Word};
use crate::sync::{Arc, AtomicU32, Condvar, Mutex, Ordering};

const OBJECTS: usize = 6;
const LAYERS: usize = 6;
const SLOT: u64 = 0;
/// Content of an unwritten page.
const NOTHING: u64 = 0;

/// A held request, modelled as a waiting thread that is released by the flag and the condition variable.
type Job = (Mutex<bool>, Condvar);

/// State shared by the layers: nodes of page tables, and objects.
struct Family {
    common: Arc<Common>,
    /// For each object, 1 if it is live.
    objects: [AtomicU32; OBJECTS],
    // The following fields are std atomics, as they are not part of the protocol and need no modelling.
    /// Id of the layer that is recorded as owner of each object.
    owners: [StdAtomicU64; OBJECTS],
    contents: [StdAtomicU64; OBJECTS],
    /// Number of pages of each layer, as counted by `update_stats`.
    pages: [AtomicI64; LAYERS],
    layers: StdAtomicU64,
    flights: Flights<()>,
}

impl ChainFamily for Family {
    type Layer = Table;
    type Parent = ();
    type Device = Device;
    type Job = Arc<Job>;

    fn table(layer: &Table) -> &Table {
        layer
    }

    fn view(device: &Device) -> &Swap<View<Self>> {
        &device.view
    }

    fn epoch(&self) -> u8 {
        0
    }

    fn set_owner(&self, object: u64, layer: &Table, slot: u64) {
        assert_eq!(slot, SLOT);
        assert_eq!(
            self.objects[object as usize].load(Ordering::SeqCst),
            1,
            "owner recorded for a freed object"
        );
        self.owners[object as usize].store(layer.id().into(), Ordering::SeqCst);
    }

    fn free(&self, word: Word) {
        assert_ne!(word.kind(), Kind::InFlight, "a page in flight is freed");
        if let Some(object) = word.object() {
            let before = self.objects[object as usize].swap(0, Ordering::SeqCst);
            assert_eq!(before, 1, "object {object} is freed twice");
        }
    }

    fn update_stats(&self, layer: &Table, old: Word, new: Word) {
        self.pages[layer.id() as usize].fetch_add(pages(new) - pages(old), Ordering::SeqCst);
    }

    fn count_preserved_page(&self, _: &Table) {}

    fn mark_unused(&self, _: &Table) {}
}

impl Family {
    fn new() -> Self {
        Self {
            common: Arc::new(Common::new().unwrap()),
            objects: std::array::from_fn(|_| AtomicU32::new(0)),
            owners: Default::default(),
            contents: Default::default(),
            pages: Default::default(),
            layers: StdAtomicU64::new(0),
            flights: Flights::default(),
        }
    }

    fn layer(&self) -> Arc<Table> {
        let id = self.layers.fetch_add(1, Ordering::SeqCst) as u32;
        Arc::new(Table::new(id, Arc::clone(&self.common)).unwrap())
    }

    /// Stores an object for a layer's page, before the slot is locked. Returns the word that refers to the
    /// object.
    fn store(&self, object: u64, layer: &Table) -> Word {
        self.objects[object as usize].store(1, Ordering::SeqCst);
        self.contents[object as usize].store(object, Ordering::SeqCst);
        self.set_owner(object, layer, SLOT);
        Word::huge(object)
    }

    /// Returns the content of a locked slot.
    fn show(&self, guard: &SlotGuard<'_>) -> u64 {
        match guard.word().object() {
            Some(object) => {
                let alive = self.objects[object as usize].load(Ordering::SeqCst);
                assert_eq!(alive, 1, "object {object} was freed");
                self.contents[object as usize].load(Ordering::SeqCst)
            }
            None if guard.word().kind() == Kind::Same => guard.word().location(),
            None => {
                assert!(matches!(guard.word().kind(), Kind::Empty | Kind::Base), "{:?}", guard.word());
                NOTHING
            }
        }
    }

    fn retire(&self, layer: &Table) {
        assert!(!free_leaf(self, layer, SLOT).1);
        assert_eq!(free_leaf(self, layer, SLOT), (false, false), "the leaf is empty now");
    }

    /// Checks that every live object is in exactly one slot of these layers, and that owner records and page
    /// counts match.
    fn check_layers(&self, layers: &[&Table]) {
        let mut held = [0; OBJECTS];
        let mut stored = [0; LAYERS];
        for layer in layers {
            let Some(leaf) = layer.leaf(SLOT) else { continue };
            let word = leaf.lock(SLOT).word();
            assert!(!word.is_picked(), "{word:?} has the mark of a finished batch");
            stored[layer.id() as usize] += pages(word);
            if let Some(object) = word.object() {
                held[object as usize] += 1;
                let recorded = self.owners[object as usize].load(Ordering::SeqCst);
                assert_eq!(recorded, u64::from(layer.id()), "owner of object {object}");
            }
        }
        let alive: Vec<u32> = self.objects.iter().map(|object| object.load(Ordering::SeqCst)).collect();
        assert_eq!(alive, held, "live objects and their slots");
        let counted: Vec<i64> = self.pages.iter().map(|pages| pages.load(Ordering::SeqCst)).collect();
        assert_eq!(counted, stored, "pages by layer");
    }
}

/// Returns the number of pages that a word stores.
fn pages(word: Word) -> i64 {
    i64::from(!matches!(word.kind(), Kind::Empty | Kind::Base))
}

struct Device {
    view: Swap<View<Family>>,
    chain: CurrentChain<Family>,
}

struct Fixture {
    family: Family,
    device: Handle<Device>,
}

struct Snapshot {
    view: View<Family>,
    number: u64,
}

impl Fixture {
    fn new() -> Arc<Self> {
        let family = Family::new();
        let chain = Chain::new(family.layer(), ());
        let device = Handle::new_cyclic(|this| Device {
            view: Swap::new(Box::new(chain.first_view(this.clone()))),
            chain: CurrentChain::new(chain),
        });
        Arc::new(Self { family, device })
    }

    /// Creates a device whose page has the content `first`, or is unwritten if `first` is NOTHING.
    fn written(first: u64) -> Arc<Self> {
        let fixture = Self::new();
        if first != NOTHING {
            fixture.write(first);
        }
        fixture
    }

    fn chain(&self) -> Arc<Chain<Family>> {
        self.device.chain.get()
    }

    fn origin(&self) -> Arc<Table> {
        self.chain().origin()
    }

    /// Checks that the device uses its chain's layer, and the conditions of [`Family::check_layers`].
    fn check_layers(&self, layers: &[&Table]) {
        let layer = pinned(|pin| self.device.view.load(pin).layer.id());
        assert_eq!(layer, self.origin().id(), "the device uses another layer than its chain");
        self.family.check_layers(layers);
    }

    // ---- requests -------------------------------------------------------------------------------

    fn write(&self, object: u64) {
        self.change(|view| {
            let leaf = view.layer.leaf_or_new(SLOT).unwrap();
            let new = self.family.store(object, &view.layer);
            view.replace(&self.family, SLOT, leaf.lock(SLOT), new).unwrap();
        });
    }

    fn discard(&self) {
        self.change(|view| {
            let leaf = view.layer.leaf_or_new(SLOT).unwrap();
            view.replace(&self.family, SLOT, leaf.lock(SLOT), Word::EMPTY).unwrap();
        });
    }

    /// Writes like [`write`](Self::write), but overwrites the object in place if no snapshot needs it.
    fn rewrite(&self, object: u64) {
        self.change(|view| {
            let leaf = view.layer.leaf_or_new(SLOT).unwrap();
            let guard = leaf.lock(SLOT);
            if let Some(old) = guard.word().object().filter(|_| !view.must_preserve(SLOT)) {
                self.family.contents[old as usize].store(object, Ordering::SeqCst);
                return;
            }
            let new = self.family.store(object, &view.layer);
            view.replace(&self.family, SLOT, guard, new).unwrap();
        });
    }

    /// Runs a change of content while writers are not frozen.
    fn change(&self, mut change: impl FnMut(&View<Family>)) {
        while !pinned(|pin| self.change_unless_frozen(pin, &mut change)) {
            let job = Arc::new((Mutex::new(false), Condvar::new()));
            if self.chain().hold(Arc::clone(&job)).is_none() {
                let mut is_released = job.0.lock();
                while !*is_released {
                    is_released = wait(&job.1, is_released);
                }
            }
        }
    }

    fn change_unless_frozen(&self, pin: &Pin<'_>, change: &mut impl FnMut(&View<Family>)) -> bool {
        let view = self.device.view.load(pin);
        if !view.is_frozen() {
            change(view);
        }
        !view.is_frozen()
    }

    fn read(&self) -> u64 {
        pinned(|pin| {
            let view = self.device.view.load(pin);
            view.layer.leaf(SLOT).map_or(NOTHING, |leaf| self.family.show(&leaf.lock(SLOT)))
        })
    }

    /// Reads like [`read`](Self::read), but as a reader that reads the parent if no layer has the page.
    fn read_through(&self) -> u64 {
        pinned(|pin| self.look(pin, self.device.view.load(pin)))
    }

    /// Returns the content of a snapshot, for a read that begins now.
    fn shows(&self, snapshot: &Snapshot) -> u64 {
        pinned(|pin| self.look(pin, &snapshot.view))
    }

    fn look(&self, pin: &Pin<'_>, view: &View<Family>) -> u64 {
        if view.run_of_parent(pin, SLOT, SLOT + 1) > 0 {
            return NOTHING;
        }
        view.with_page(pin, SLOT, |found| match found {
            Some((_, guard)) => {
                assert_eq!(pages(guard.word()), 1, "an empty slot is taken for a page");
                self.family.show(&guard)
            }
            None => NOTHING,
        })
    }

    // ---- changes of the chain -------------------------------------------------------------------

    fn snapshot(&self) -> Snapshot {
        let chain = self.device.chain.freeze();
        let snapshot = self.attach(&chain);
        continue_requests(chain.thaw());
        snapshot
    }

    fn attach(&self, chain: &Arc<Chain<Family>>) -> Snapshot {
        let view = Chain::attach(chain, self.family.layer());
        let Role::Snapshot { number, .. } = view.role else { unreachable!() };
        Snapshot { view, number }
    }

    fn rewind(&self) {
        let new = Chain::new(self.family.layer(), ());
        let (unused, held) = self.device.chain.rewind(&self.family, &new, &self.device);
        continue_requests(held);
        if let Some(layer) = unused {
            self.family.retire(&layer);
        }
    }

    /// Executes a cleaner step for a removed snapshot. Returns true if slots in flight remain.
    fn pass_on(&self, chain: &Chain<Family>, number: u64) -> bool {
        chain.pass_on(&self.family, number, 0, LEAF_SLOTS).unwrap()
    }

    fn unlink(&self, chain: &Chain<Family>, number: u64) {
        for layer in chain.unlink(number) {
            self.family.retire(&layer);
        }
    }

    fn remove(&self, chain: &Chain<Family>, number: u64) {
        chain.begin_delete(number);
        assert!(!self.pass_on(chain, number));
        self.unlink(chain, number);
    }
}

fn continue_requests(held: Vec<Arc<Job>>) {
    for job in held {
        *job.0.lock() = true;
        job.1.notify_one();
    }
}

/// Checks every interleaving with at most `preemptions` preemptions. A bound of two is known to find nearly
/// all faults.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn spawn(fixture: &Arc<Fixture>, work: impl FnOnce(&Fixture) + 'static) -> thread::JoinHandle<()> {
    let fixture = Arc::clone(fixture);
    thread::spawn(move || work(&fixture))
}
