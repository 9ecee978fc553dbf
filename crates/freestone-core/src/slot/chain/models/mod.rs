//! loom models of a chain: the protocol itself, with the real slots, over tables of a few.
//!
//! One page. An object is a number; reading one that was freed, freeing one twice, forgetting one,
//! and a note that names another owner than the slot that has it are errors, as are accounts that
//! do not fit.
//!
//! Run with `cargo xtask models`.

mod background;
mod runs;
mod supply;

use std::sync::Arc as Handle;
use std::sync::atomic::{AtomicI64, AtomicU64 as Noted};

use loom::thread;

use super::{Chain, Current, Kin, Role, View, free_leaf};
use crate::pin::wait;
use crate::pin::{Pin, Swap, pinned};
use crate::slot::{Common, Flights, Kind, LEAF_SLOTS, SlotGuard, Table, Word};
use crate::sync::{Arc, AtomicU32, Condvar, Mutex, Ordering};

const OBJECTS: usize = 6;
const LAYERS: usize = 6;
/// The page.
const SLOT: u64 = 0;
/// What a page shows that nobody wrote.
const NOTHING: u64 = 0;

/// A request that is held: a thread that waits stands for it.
type Job = (Mutex<bool>, Condvar);

/// What layers have in common: their nodes, and the objects.
struct Family {
    common: Arc<Common>,
    /// 1 is alive.
    objects: [AtomicU32; OBJECTS],
    // No part of the protocol, so that loom need not look at them: what is noted under locks.
    /// The layer that has an object.
    owners: [Noted; OBJECTS],
    /// What an object shows.
    contents: [Noted; OBJECTS],
    /// By layer.
    pages: [AtomicI64; LAYERS],
    layers: Noted,
    flights: Flights<()>,
}

impl Kin for Family {
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

    fn now(&self) -> u8 {
        0
    }

    fn set_owner(&self, object: u64, layer: &Table, slot: u64) {
        assert_eq!(slot, SLOT);
        assert_eq!(self.objects[object as usize].load(Ordering::SeqCst), 1, "a note about what was freed");
        self.owners[object as usize].store(layer.id().into(), Ordering::SeqCst);
    }

    fn free(&self, word: Word) {
        assert_ne!(word.kind(), Kind::InFlight, "a page in flight is nobody's to free");
        if let Some(object) = word.object() {
            let before = self.objects[object as usize].swap(0, Ordering::SeqCst);
            assert_eq!(before, 1, "object {object} is freed twice");
        }
    }

    fn account(&self, layer: &Table, old: Word, new: Word) {
        self.pages[layer.id() as usize].fetch_add(pages(new) - pages(old), Ordering::SeqCst);
    }

    fn went_over(&self, _: &Table) {}

    fn set_loose(&self, _: &Table) {}
}

impl Family {
    fn new() -> Self {
        Self {
            common: Arc::new(Common::new().unwrap()),
            objects: std::array::from_fn(|_| AtomicU32::new(0)),
            owners: Default::default(),
            contents: Default::default(),
            pages: Default::default(),
            layers: Noted::new(0),
            flights: Flights::default(),
        }
    }

    fn layer(&self) -> Arc<Table> {
        let id = self.layers.fetch_add(1, Ordering::SeqCst) as u32;
        Arc::new(Table::new(id, Arc::clone(&self.common)).unwrap())
    }

    /// Stores what a layer's page shall hold, before the slot is locked.
    fn store(&self, object: u64, layer: &Table) -> Word {
        self.objects[object as usize].store(1, Ordering::SeqCst);
        self.contents[object as usize].store(object, Ordering::SeqCst);
        self.set_owner(object, layer, SLOT);
        Word::huge(object)
    }

    /// What a locked slot shows.
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

    /// A layer that nobody uses any more is freed.
    fn retire(&self, layer: &Table) {
        assert!(!free_leaf(self, layer, SLOT).1);
        assert_eq!(free_leaf(self, layer, SLOT), (false, false), "it is empty now");
    }

    /// Every object that lives is in one slot of these layers, and no other; notes and accounts say
    /// the same.
    fn holds(&self, layers: &[&Table]) {
        let mut held = [0; OBJECTS];
        let mut stored = [0; LAYERS];
        for layer in layers {
            let Some(leaf) = layer.leaf(SLOT) else { continue };
            let word = leaf.lock(SLOT).word();
            assert!(!word.is_picked(), "{word:?} bears the mark of a batch that is over");
            stored[layer.id() as usize] += pages(word);
            if let Some(object) = word.object() {
                held[object as usize] += 1;
                let noted = self.owners[object as usize].load(Ordering::SeqCst);
                assert_eq!(noted, u64::from(layer.id()), "whose object {object} is");
            }
        }
        let alive: Vec<u32> = self.objects.iter().map(|object| object.load(Ordering::SeqCst)).collect();
        assert_eq!(alive, held, "objects that live, and how many slots hold them");
        let counted: Vec<i64> = self.pages.iter().map(|pages| pages.load(Ordering::SeqCst)).collect();
        assert_eq!(counted, stored, "pages by layer");
    }
}

/// How many pages a slot stores.
fn pages(word: Word) -> i64 {
    i64::from(!matches!(word.kind(), Kind::Empty | Kind::Base))
}

struct Device {
    view: Swap<View<Family>>,
    chain: Current<Family>,
}

/// A device and its family.
struct World {
    family: Family,
    device: Handle<Device>,
}

/// A snapshot that began.
struct Snapshot {
    view: View<Family>,
    number: u64,
}

impl World {
    fn new() -> Arc<Self> {
        let family = Family::new();
        let chain = Chain::new(family.layer(), ());
        let device = Handle::new_cyclic(|this| Device {
            view: Swap::new(Box::new(chain.first_view(this.clone()))),
            chain: Current::new(chain),
        });
        Arc::new(Self { family, device })
    }

    /// One whose page has been written, or not.
    fn written(first: u64) -> Arc<Self> {
        let world = Self::new();
        if first != NOTHING {
            world.write(first);
        }
        world
    }

    fn chain(&self) -> Arc<Chain<Family>> {
        self.device.chain.get()
    }

    fn origin(&self) -> Arc<Table> {
        self.chain().origin()
    }

    /// The device works in its chain's layer; else see [`Family::holds`].
    fn holds(&self, layers: &[&Table]) {
        let layer = pinned(|pin| self.device.view.load(pin).layer.id());
        assert_eq!(layer, self.origin().id(), "the device is not where its chain is");
        self.family.holds(layers);
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

    /// As [`write`](Self::write), in place where that may be.
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

    /// Does what changes content, when no snapshot is just beginning.
    fn change(&self, mut change: impl FnMut(&View<Family>)) {
        while !pinned(|pin| self.change_unless_frozen(pin, &mut change)) {
            let job = Arc::new((Mutex::new(false), Condvar::new()));
            if self.chain().hold(Arc::clone(&job)).is_none() {
                let mut goes_on = job.0.lock();
                while !*goes_on {
                    goes_on = wait(&job.1, goes_on);
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

    /// As [`read`](Self::read), as one does who reads through the device to what lies below.
    fn read_through(&self) -> u64 {
        pinned(|pin| self.look(pin, self.device.view.load(pin)))
    }

    /// What a snapshot shows to a thread that begins to read now.
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
        carry_on(chain.thaw());
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
        carry_on(held);
        if let Some(layer) = unused {
            self.family.retire(&layer);
        }
    }

    /// A step of the cleaner for a removed snapshot. Returns whether something is left that is in
    /// flight.
    fn pass_on(&self, chain: &Chain<Family>, number: u64) -> bool {
        chain.pass_on(&self.family, number, 0, LEAF_SLOTS).unwrap()
    }

    /// The cleaner's last step.
    fn unlink(&self, chain: &Chain<Family>, number: u64) {
        for layer in chain.unlink(number) {
            self.family.retire(&layer);
        }
    }

    /// All that the cleaner does.
    fn remove(&self, chain: &Chain<Family>, number: u64) {
        chain.begin_delete(number);
        assert!(!self.pass_on(chain, number));
        self.unlink(chain, number);
    }
}

fn carry_on(held: Vec<Arc<Job>>) {
    for job in held {
        *job.0.lock() = true;
        job.1.notify_one();
    }
}

/// Every interleaving with at most so many preemptions; two are known to find nearly all faults.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> thread::JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}
