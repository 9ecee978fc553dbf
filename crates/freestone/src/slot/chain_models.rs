//! loom models of a chain: a live device, its snapshots, and who of them holds a page, as in `ram::chain`.
//!
//! One page. What is modelled step by step is what decides: slots and their locks, pins, swapped views and lists, the
//! chain's state. An object is a number; reading one that was freed, freeing one twice and forgetting one are errors.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p freestone --lib models`.

use loom::thread;

use super::lock::lock;
use super::{Kind, SlotGuard, Word};
use crate::parking::Parking;
use crate::pin::{Domain, Participant, Pin, Swap};
use crate::sync::{Arc, AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, wait};

const OBJECTS: usize = 6;
/// What a page shows that nobody wrote.
const NOTHING: u64 = 0;

/// One slot. That there is a leaf for it is not modelled: an absent one is an empty slot.
struct Layer {
    slot: AtomicU64,
    parking: Parking,
}

impl Layer {
    fn new() -> Arc<Self> {
        Arc::new(Self { slot: AtomicU64::new(0), parking: Parking::default() })
    }

    fn lock(&self) -> SlotGuard<'_> {
        lock(&self.slot, &self.parking)
    }

    fn peek(&self) -> Word {
        // Relaxed: as in `Leaf::peek`.
        Word::from_bits(self.slot.load(Ordering::Relaxed))
    }
}

#[derive(Clone)]
struct Member {
    number: u64,
    layer: Arc<Layer>,
    dying: bool,
}

struct List {
    origin: Arc<Layer>,
    snapshots: Vec<Member>,
}

/// A live device's.
struct View {
    layer: Arc<Layer>,
    snapshots: Vec<Member>,
    frozen: bool,
}

struct State {
    origin: Arc<Layer>,
    snapshots: Vec<Member>,
    next: u64,
    freezes: u32,
    live: bool,
}

struct Chain {
    list: Swap<List>,
    state: Mutex<State>,
    thawed: Condvar,
}

/// A device, its present chain, and the objects.
struct World {
    domain: Domain,
    view: Swap<View>,
    chain: Mutex<Arc<Chain>>,
    /// 1 is alive.
    objects: [AtomicU32; OBJECTS],
}

/// Who of `members`, from the younger to the older, is given a word: `ram::chain::receiver`.
fn receiver<'a>(members: impl Iterator<Item = &'a Member>) -> Option<&'a Layer> {
    for member in members {
        if member.layer.peek() != Word::EMPTY {
            return None;
        }
        if !member.dying {
            return Some(&member.layer);
        }
    }
    None
}

fn hand_over(to: &Layer, word: Word) {
    let guard = to.lock();
    assert_eq!(guard.word(), Word::EMPTY, "a snapshot's page is set once");
    guard.publish(if word == Word::EMPTY { Word::BASE } else { word });
}

impl Chain {
    fn new() -> Arc<Self> {
        let origin = Layer::new();
        let list = List { origin: Arc::clone(&origin), snapshots: Vec::new() };
        let state = State { origin, snapshots: Vec::new(), next: 0, freezes: 0, live: true };
        Arc::new(Self { list: Swap::new(Box::new(list)), state: Mutex::new(state), thawed: Condvar::new() })
    }

    fn view(state: &State) -> Box<View> {
        Box::new(View {
            layer: Arc::clone(&state.origin),
            snapshots: state.snapshots.clone(),
            frozen: state.freezes > 0,
        })
    }

    fn publish_list(&self, world: &World, state: &State) {
        let list = List { origin: Arc::clone(&state.origin), snapshots: state.snapshots.clone() };
        drop(self.list.replace(Box::new(list), &world.domain));
    }

    fn publish_live(world: &World, state: &MutexGuard<'_, State>) {
        if state.live {
            drop(world.view.replace(Self::view(state), &world.domain));
        }
    }

    fn freeze(&self, world: &World) {
        let mut state = self.state.lock();
        state.freezes += 1;
        Self::publish_live(world, &state);
    }

    fn attach(&self, world: &World) -> Snapshot {
        let mut state = self.state.lock();
        let (number, layer) = (state.next, Layer::new());
        state.next += 1;
        state.snapshots.push(Member { number, layer: Arc::clone(&layer), dying: false });
        self.publish_list(world, &state);
        Self::publish_live(world, &state);
        Snapshot { number, layer }
    }

    fn thaw(&self, world: &World) {
        let mut state = self.state.lock();
        state.freezes -= 1;
        Self::publish_live(world, &state);
        drop(state);
        self.thawed.notify_all();
    }

    fn wait_until_thawed(&self) {
        let mut state = self.state.lock();
        while state.freezes > 0 && state.live {
            state = wait(&self.thawed, state);
        }
    }

    fn doom(&self, world: &World, number: u64) {
        let mut state = self.state.lock();
        if let Some(member) = state.snapshots.iter_mut().find(|member| member.number == number) {
            member.dying = true;
        }
        self.publish_list(world, &state);
        Self::publish_live(world, &state);
    }

    fn pass_on(&self, world: &World, number: u64) {
        let (origin, from, older) = {
            let state = self.state.lock();
            let at = state.snapshots.iter().position(|member| member.number == number).unwrap();
            let older = state.snapshots[..at].to_vec();
            (Arc::clone(&state.origin), Arc::clone(&state.snapshots[at].layer), older)
        };
        if from.peek() == Word::EMPTY {
            return;
        }
        let still = origin.lock();
        let guard = from.lock();
        let word = guard.word();
        if word.kind() != Kind::Empty {
            guard.publish(Word::EMPTY);
            match receiver(older.iter().rev()) {
                Some(heir) => hand_over(heir, word),
                None => world.free(word),
            }
        }
        drop(still);
    }

    fn bury(&self, world: &World, number: u64) {
        let mut state = self.state.lock();
        let at = state.snapshots.iter().position(|member| member.number == number).unwrap();
        let gone = state.snapshots.remove(at);
        self.publish_list(world, &state);
        Self::publish_live(world, &state);
        drop(state);
        world.retire(&gone.layer);
    }

    /// All that the cleaner does for a removed snapshot.
    fn remove(&self, world: &World, number: u64) {
        self.doom(world, number);
        self.pass_on(world, number);
        self.bury(world, number);
    }
}

/// A snapshot that began.
struct Snapshot {
    number: u64,
    layer: Arc<Layer>,
}

impl World {
    fn new() -> Arc<Self> {
        let chain = Chain::new();
        let view = Chain::view(&chain.state.lock());
        Arc::new(Self {
            domain: Domain::new(),
            view: Swap::new(view),
            chain: Mutex::new(chain),
            objects: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    fn chain(&self) -> Arc<Chain> {
        Arc::clone(&self.chain.lock())
    }

    fn free(&self, word: Word) {
        if word.kind() == Kind::Huge {
            let before = self.objects[word.location() as usize].swap(0, Ordering::SeqCst);
            assert_eq!(before, 1, "object {} is freed twice", word.location());
        }
    }

    /// A layer that nobody uses any more is freed.
    fn retire(&self, layer: &Layer) {
        let guard = layer.lock();
        let word = guard.word();
        guard.publish(Word::EMPTY);
        self.free(word);
    }

    /// What a locked slot shows.
    fn show(&self, guard: &SlotGuard<'_>) -> u64 {
        match guard.word().kind() {
            Kind::Huge => {
                let object = guard.word().location();
                assert_eq!(
                    self.objects[object as usize].load(Ordering::SeqCst),
                    1,
                    "object {object} was freed"
                );
                object
            }
            _ => NOTHING,
        }
    }

    fn write(&self, participant: &Participant, object: u64) {
        self.objects[object as usize].store(1, Ordering::SeqCst);
        loop {
            let pin = participant.pin();
            let view = self.view.load(&pin);
            if view.frozen {
                drop(pin);
                self.chain().wait_until_thawed();
                continue;
            }
            let guard = view.layer.lock();
            let held = guard.word();
            let left = match receiver(view.snapshots.iter().rev()) {
                Some(to) => {
                    hand_over(to, held);
                    Word::EMPTY
                }
                None => held,
            };
            guard.publish(Word::huge(object));
            self.free(left);
            return;
        }
    }

    fn read(&self, participant: &Participant) -> u64 {
        let pin = participant.pin();
        let guard = self.view.load(&pin).layer.lock();
        self.show(&guard)
    }

    /// `View::with_page` of a snapshot.
    fn read_snapshot(&self, chain: &Chain, pin: &Pin<'_>, snapshot: &Snapshot) -> u64 {
        if snapshot.layer.peek() != Word::EMPTY {
            let guard = snapshot.layer.lock();
            if guard.word() != Word::EMPTY {
                return self.show(&guard);
            }
        }
        let list = chain.list.load(pin);
        let origin = list.origin.lock();
        for member in list.snapshots.iter().filter(|member| member.number >= snapshot.number) {
            let guard = member.layer.lock();
            if guard.word() != Word::EMPTY {
                return self.show(&guard);
            }
        }
        self.show(&origin)
    }

    fn snapshot(&self) -> Snapshot {
        let chain = self.freeze();
        let snapshot = chain.attach(self);
        chain.thaw(self);
        snapshot
    }

    fn freeze(&self) -> Arc<Chain> {
        let chain = self.chain.lock();
        chain.freeze(self);
        Arc::clone(&chain)
    }

    fn rewind(&self) {
        let new = Chain::new();
        let mut chain = self.chain.lock();
        let old = std::mem::replace(&mut *chain, Arc::clone(&new));
        // The state is held until nobody uses the old view any more: what changes for snapshots of the old chain in
        // between would not be seen by writers that still do.
        let mut state = old.state.lock();
        state.live = false;
        let unused = state.snapshots.is_empty() && state.freezes == 0;
        let view = Chain::view(&new.state.lock());
        let before = self.view.replace(view, &self.domain);
        drop(state);
        old.thawed.notify_all();
        if unused {
            self.retire(&before.layer);
        }
    }

    /// Every object that lives is in one slot of these layers, and no other.
    fn holds(&self, layers: &[&Layer]) {
        let mut held = [0; OBJECTS];
        for layer in layers {
            let word = layer.lock().word();
            if word.kind() == Kind::Huge {
                held[word.location() as usize] += 1;
            }
        }
        let alive: Vec<u32> = self.objects.iter().map(|object| object.load(Ordering::SeqCst)).collect();
        assert_eq!(alive, held, "objects that live, and how many slots hold them");
    }

    fn origin(&self) -> Arc<Layer> {
        Arc::clone(&self.chain().state.lock().origin)
    }
}

/// What a snapshot shows to a thread that begins to read now.
fn shows(world: &World, chain: &Chain, snapshot: &Snapshot) -> u64 {
    let participant = world.domain.join();
    let pin = participant.pin();
    world.read_snapshot(chain, &pin, snapshot)
}

/// Every interleaving with at most two preemptions, which is known to find nearly all faults.
fn bounded(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World, &Participant) + 'static) -> thread::JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world, &world.domain.join()))
}

/// A world whose page has been written, or not.
fn written(first: u64) -> Arc<World> {
    let world = World::new();
    if first != NOTHING {
        world.write(&world.domain.join(), first);
    }
    world
}

/// The first write since a snapshot, while the snapshot reads through to the origin.
#[test]
fn first_write_versus_read_through() {
    for first in [NOTHING, 1] {
        bounded(move || {
            let world = written(first);
            let (chain, snapshot) = (world.chain(), world.snapshot());
            let writer = spawn(&world, |world, participant| world.write(participant, 2));
            assert_eq!(shows(&world, &chain, &snapshot), first);
            let live = world.read(&world.domain.join());
            assert!(live == first || live == 2);
            writer.join().unwrap();
            assert_eq!(shows(&world, &chain, &snapshot), first);
            assert_eq!(world.read(&world.domain.join()), 2);
            world.holds(&[&world.origin(), &snapshot.layer]);
        });
    }
}

/// Two writers of one page: what was there goes over once, and one of the two is freed.
#[test]
fn two_writers_of_a_page_with_a_snapshot() {
    bounded(|| {
        let world = written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let other = spawn(&world, |world, participant| world.write(participant, 2));
        world.write(&world.domain.join(), 3);
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        other.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        world.holds(&[&world.origin(), &snapshot.layer]);
    });
}

/// A write with two snapshots, the older of which reads through the younger.
#[test]
fn origin_write_with_a_chain_of_two() {
    for between in [false, true] {
        bounded(move || {
            let world = written(1);
            let chain = world.chain();
            let older = world.snapshot();
            if between {
                world.write(&world.domain.join(), 2);
            }
            let younger = world.snapshot();
            let wanted = if between { 2 } else { 1 };
            let writer = spawn(&world, |world, participant| {
                world.write(participant, 3);
                world.write(participant, 4);
            });
            assert_eq!(shows(&world, &chain, &older), 1);
            assert_eq!(shows(&world, &chain, &younger), wanted);
            writer.join().unwrap();
            assert_eq!(shows(&world, &chain, &older), 1);
            assert_eq!(shows(&world, &chain, &younger), wanted);
            world.holds(&[&world.origin(), &older.layer, &younger.layer]);
        });
    }
}

/// A snapshot begins while the page is written: it shows one moment, which is not before what was answered.
#[test]
fn creation_versus_writes() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
        let answered = Arc::new(AtomicU32::new(1));
        let writer = spawn(&world, {
            let answered = Arc::clone(&answered);
            move |world, participant| {
                for object in [2, 3] {
                    world.write(participant, object);
                    answered.store(object as u32, Ordering::SeqCst);
                }
            }
        });
        let before = u64::from(answered.load(Ordering::SeqCst));
        let snapshot = world.snapshot();
        let shown = shows(&world, &chain, &snapshot);
        assert!(shown >= before, "{shown} is older than {before}, which was answered");
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), shown, "frozen");
        world.holds(&[&world.origin(), &snapshot.layer]);
    });
}

/// Two devices at one moment: what was written to the second after the first had it is not shown without that.
#[test]
fn creation_on_two_devices_is_one_moment() {
    bounded(|| {
        let worlds = [written(1), written(1)];
        let writer = {
            let worlds = worlds.clone();
            thread::spawn(move || {
                for world in &worlds {
                    world.write(&world.domain.join(), 2);
                }
            })
        };
        let chains = [worlds[0].freeze(), worlds[1].freeze()];
        let snapshots: Vec<_> =
            worlds.iter().zip(&chains).map(|(world, chain)| chain.attach(world)).collect();
        for (world, chain) in worlds.iter().zip(&chains) {
            chain.thaw(world);
        }
        writer.join().unwrap();
        let shown: Vec<_> = (0..2).map(|at| shows(&worlds[at], &chains[at], &snapshots[at])).collect();
        assert!(shown[0] >= shown[1], "the second has what the first has not: {shown:?}");
    });
}

/// A rewind while the page is written and a snapshot is read.
#[test]
fn rewind_versus_io() {
    bounded(|| {
        let world = written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let writer = spawn(&world, |world, participant| world.write(participant, 2));
        world.rewind();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        let live = world.read(&world.domain.join());
        assert!(live == NOTHING || live == 2, "{live} is from before the rewind");
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        let old = Arc::clone(&chain.state.lock().origin);
        world.holds(&[&world.origin(), &old, &snapshot.layer]);
    });
}

/// A rewind without snapshots frees what was there, once nobody works on it.
#[test]
fn a_rewound_layer_is_freed_when_nobody_uses_it() {
    bounded(|| {
        let world = written(1);
        let writer = spawn(&world, |world, participant| world.write(participant, 2));
        world.rewind();
        writer.join().unwrap();
        world.holds(&[&world.origin()]);
    });
}

/// The younger of two snapshots is removed while the page is written and the older one is read.
#[test]
fn deletion_in_the_middle_versus_readers_and_writers() {
    for written_before in [false, true] {
        bounded(move || {
            let world = written(1);
            let chain = world.chain();
            let (older, younger) = (world.snapshot(), world.snapshot());
            if written_before {
                // The younger one has it.
                world.write(&world.domain.join(), 3);
            }
            let cleaner = spawn(&world, {
                let chain = Arc::clone(&chain);
                move |world, _| chain.remove(world, younger.number)
            });
            let writer = spawn(&world, |world, participant| world.write(participant, 2));
            assert_eq!(shows(&world, &chain, &older), 1);
            writer.join().unwrap();
            cleaner.join().unwrap();
            assert_eq!(shows(&world, &chain, &older), 1);
            world.holds(&[&world.origin(), &older.layer]);
        });
    }
}

/// The two younger ones of three snapshots are removed at one time: what the youngest has goes past the other.
#[test]
fn two_in_a_row_are_removed_while_the_page_is_written() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
        let oldest = world.snapshot();
        let (middle, youngest) = (world.snapshot(), world.snapshot());
        let writer = spawn(&world, |world, participant| world.write(participant, 2));
        chain.doom(&world, middle.number);
        chain.pass_on(&world, middle.number);
        chain.doom(&world, youngest.number);
        chain.pass_on(&world, youngest.number);
        chain.bury(&world, middle.number);
        chain.pass_on(&world, youngest.number);
        chain.bury(&world, youngest.number);
        assert_eq!(shows(&world, &chain, &oldest), 1);
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &oldest), 1);
        world.holds(&[&world.origin(), &oldest.layer]);
    });
}

/// A snapshot is removed while its origin is rewound and written.
#[test]
fn deletion_versus_rewind_and_writes() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
        let (older, younger) = (world.snapshot(), world.snapshot());
        let cleaner = spawn(&world, {
            let chain = Arc::clone(&chain);
            move |world, _| chain.remove(world, younger.number)
        });
        let writer = spawn(&world, |world, participant| world.write(participant, 2));
        world.rewind();
        writer.join().unwrap();
        cleaner.join().unwrap();
        assert_eq!(shows(&world, &chain, &older), 1);
        let old = Arc::clone(&chain.state.lock().origin);
        world.holds(&[&world.origin(), &old, &older.layer]);
    });
}
