//! loom models of a chain: a live device, its snapshots, and who of them holds a page, as in `ram::chain`.
//!
//! One page. What is modelled step by step is what decides: slots and their locks, pins, swapped views and lists, the
//! chain's state. An object is a number; reading one that was freed, freeing one twice and forgetting one are errors.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p freestone --lib models`.

mod runs;

use super::lock::lock;
use super::{Kind, SlotGuard, Word};
use crate::held::Held;
use crate::parking::Parking;
use crate::pin::{Pin, Swap, pinned};
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
    held: Held<Arc<Job>>,
}

/// A request that is held: a thread that waits stands for it.
type Job = (Mutex<bool>, Condvar);

/// A device, its present chain, and the objects.
struct World {
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
        Arc::new(Self { list: Swap::new(Box::new(list)), state: Mutex::new(state), held: Held::new() })
    }

    fn view(state: &State) -> Box<View> {
        Box::new(View {
            layer: Arc::clone(&state.origin),
            snapshots: state.snapshots.clone(),
            frozen: state.freezes > 0,
        })
    }

    fn publish_list(&self, state: &State) {
        let list = List { origin: Arc::clone(&state.origin), snapshots: state.snapshots.clone() };
        drop(self.list.replace(Box::new(list)));
    }

    fn publish_live(world: &World, state: &MutexGuard<'_, State>) {
        if state.live {
            drop(world.view.replace(Self::view(state)));
        }
    }

    fn freeze(&self, world: &World) {
        let mut state = self.state.lock();
        state.freezes += 1;
        if state.live {
            self.held.shut();
        }
        Self::publish_live(world, &state);
    }

    fn attach(&self, world: &World) -> Snapshot {
        let mut state = self.state.lock();
        let (number, layer) = (state.next, Layer::new());
        state.next += 1;
        state.snapshots.push(Member { number, layer: Arc::clone(&layer), dying: false });
        self.publish_list(&state);
        Self::publish_live(world, &state);
        Snapshot { number, layer }
    }

    fn thaw(&self, world: &World) {
        let mut state = self.state.lock();
        state.freezes -= 1;
        Self::publish_live(world, &state);
        let held = if state.freezes == 0 { self.held.open() } else { Vec::new() };
        drop(state);
        carry_on(held);
    }

    fn hold(&self) {
        let job = Arc::new((Mutex::new(false), Condvar::new()));
        if self.held.hold(Arc::clone(&job)).is_none() {
            let mut goes_on = job.0.lock();
            while !*goes_on {
                goes_on = wait(&job.1, goes_on);
            }
        }
    }

    fn doom(&self, world: &World, number: u64) {
        let mut state = self.state.lock();
        if let Some(member) = state.snapshots.iter_mut().find(|member| member.number == number) {
            member.dying = true;
        }
        self.publish_list(&state);
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
        self.publish_list(&state);
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

fn carry_on(held: Vec<Arc<Job>>) {
    for job in held {
        *job.0.lock() = true;
        job.1.notify_one();
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

    fn write(&self, object: u64) {
        self.objects[object as usize].store(1, Ordering::SeqCst);
        while !pinned(|pin| self.write_unless_frozen(pin, object)) {
            self.chain().hold();
        }
    }

    fn write_unless_frozen(&self, pin: &Pin<'_>, object: u64) -> bool {
        let view = self.view.load(pin);
        if !view.frozen {
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
        }
        !view.frozen
    }

    fn read(&self) -> u64 {
        pinned(|pin| {
            let guard = self.view.load(pin).layer.lock();
            self.show(&guard)
        })
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
        let before = self.view.replace(view);
        drop(state);
        carry_on(old.held.open());
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
