//! Random schedules of pushes that run during a prune, with a simulated clock.
//!
//! An actor passes the turn before each request, and the clock advances with each turn. So a push takes
//! minutes, as over a slow link, and starts or ends at any step of the prune.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Flags};
use freestone_store::format::{CHUNK_BYTES, PAGE};
use freestone_store::objects::{CallLimits, Fault, Objects};
use freestone_store::prune::prune;
use freestone_store::push::{Options, Source, push};
use freestone_store::store::{CreateOptions, Error, Store};
use freestone_testkit::objects::{Effect, MemoryStore, Method};
use freestone_testkit::{Model, Rng};

use crate::kit::*;

const GRACE: Duration = Duration::from_secs(3600);
const SCHEDULES: u64 = 30;
const PUSHERS: usize = 2;
const PUSHES: u64 = 6;
/// Number of the actor that prunes. All other actors push.
const PRUNER: usize = 0;
const CHUNKS: usize = 3;
/// Number of different contents that a chunk can have.
const CONTENTS: u64 = 6;

/// Scheduler that lets one actor run at a time.
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
    memory: Arc<MemoryStore>,
    /// Number of checked objects whose deletion is not complete. The clock stands still meanwhile, because a
    /// prune limits the time from check to deletion.
    looks: Arc<AtomicUsize>,
}

struct State {
    rng: Rng,
    live: [bool; PUSHERS + 1],
    current: usize,
}

/// The check of an object before the object is deleted. The check ends after `left` more requests of this
/// thread.
struct Look {
    looks: Arc<AtomicUsize>,
    left: u32,
}

impl Drop for Look {
    fn drop(&mut self) {
        self.looks.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    static LOOK: RefCell<Option<Look>> = const { RefCell::new(None) };
}

impl Turns {
    fn wait(&self, actor: usize) -> MutexGuard<'_, State> {
        self.changed.wait_while(self.state.lock().unwrap(), |state| state.current != actor).unwrap()
    }

    fn give(&self, state: &mut State) {
        let live: Vec<usize> = (0..state.live.len()).filter(|actor| state.live[*actor]).collect();
        if live.is_empty() {
            return;
        }
        let any = live[state.rng.below(live.len() as u64) as usize];
        let next = if state.live[PRUNER] && state.rng.chance(96) { PRUNER } else { any };
        if next != state.current {
            state.current = next;
            self.changed.notify_all();
        }
    }

    /// Passes the turn to another actor before a request, and waits for the next turn.
    fn step(&self, actor: usize) {
        let look = LOOK.take().and_then(|mut look| {
            look.left -= 1;
            (look.left > 0).then_some(look)
        });
        let mut state = self.wait(actor);
        // A prune makes many more requests than a push, several at a time, so each of them takes less time.
        let seconds = if actor == PRUNER { 2 } else { 40 };
        let seconds = state.rng.below(seconds);
        if self.looks.load(Ordering::SeqCst) == 0 {
            self.memory.advance_clock(Duration::from_secs(seconds));
        }
        self.give(&mut state);
        drop(state);
        drop(self.wait(actor));
        LOOK.set(look);
    }

    /// Advances the clock by `time` as soon as no deletion is in progress.
    fn idle(&self, actor: usize, time: Duration) {
        loop {
            self.step(actor);
            let _state = self.state.lock().unwrap();
            if self.looks.load(Ordering::SeqCst) == 0 {
                return self.memory.advance_clock(time);
            }
        }
    }

    fn look(&self) {
        // The clock advances only with this lock held.
        let _state = self.state.lock().unwrap();
        self.looks.fetch_add(1, Ordering::SeqCst);
        LOOK.set(Some(Look { looks: Arc::clone(&self.looks), left: 2 }));
    }
}

/// An actor of the schedule. Dropping the actor ends its turns, also on panic.
struct Actor<'a> {
    turns: &'a Turns,
    number: usize,
    pushers: &'a AtomicUsize,
}

impl Drop for Actor<'_> {
    fn drop(&mut self) {
        if self.number != PRUNER {
            self.pushers.fetch_sub(1, Ordering::SeqCst);
        }
        LOOK.set(None);
        let mut state = self.turns.wait(self.number);
        state.live[self.number] = false;
        self.turns.give(&mut state);
    }
}

/// Returns a device with one page of random content in each chunk.
fn device(rng: &mut Rng) -> Model {
    let device = Model::new(CHUNKS * CHUNK_BYTES, 512);
    let mut page = vec![0; PAGE];
    for chunk in 0..CHUNKS {
        Rng::new(rng.below(CONTENTS)).fill(&mut page);
        device.write_at((chunk * CHUNK_BYTES) as u64, &page, Flags::empty()).unwrap();
    }
    device
}

fn user(memory: &MemoryStore) -> (Arc<MemoryStore>, Store) {
    let memory = Arc::new(memory.new_client());
    let objects = Arc::clone(&memory) as Arc<dyn Objects>;
    let begin = CreateOptions { encrypted: false, grace: GRACE };
    let (store, _) = Store::open_or_create(objects, None, begin, soon()).unwrap();
    (memory, store)
}

/// Makes pushes fail before they write a manifest, so that they leave unreferenced chunks.
fn cut_off(memory: &MemoryStore) {
    memory.set_fault_rule(|call| {
        if call.method == Method::Put && call.key.starts_with("manifests/") {
            return Effect::Fail(Fault::Denied("cut off".to_owned()));
        }
        Effect::Pass
    });
}

/// Pushes random devices to the tags of this actor. Returns the expected content by tag.
fn pusher(
    turns: &Turns,
    actor: usize,
    (memory, store): &(Arc<MemoryStore>, Store),
    seed: u64,
) -> BTreeMap<String, Model> {
    let mut rng = Rng::new(seed);
    let is_cancelled = || {
        turns.step(actor);
        false
    };
    let mut shown = BTreeMap::new();
    for _ in 0..PUSHES {
        turns.idle(actor, GRACE / 8 * rng.below(6) as u32);
        let tag = format!("{actor}-{}", rng.below(2));
        let limits =
            CallLimits { deadline: Instant::now() + Duration::from_secs(60), is_cancelled: &is_cancelled };
        if rng.chance(20) {
            match store.remove_tag(&tag, limits) {
                Ok(()) | Err(Error::NoTag(_)) => {}
                Err(error) => panic!("{error}"),
            }
            shown.remove(&tag);
            continue;
        }
        if rng.chance(40) {
            cut_off(memory);
        }
        let device = device(&mut rng);
        let source = Source { device: &device, label: "test", base_image: None };
        let options = Options { tag: &tag, full: rng.chance(50), threads: 1, is_new: false };
        match push(store, source, options, &|_, _| {}, limits) {
            Ok(_) => drop(shown.insert(tag, device)),
            Err(
                Error::TooSlow(_) | Error::ObjectPruned(_) | Error::Object { fault: Fault::Denied(_), .. },
            ) => {}
            Err(error) => panic!("{seed}: {error}"),
        }
        memory.heal();
    }
    shown
}

/// Prunes until all pushers are done, and returns the number of deleted objects.
fn pruner(turns: &Turns, store: &Store, pushers: &AtomicUsize) -> u64 {
    let is_cancelled = || {
        turns.step(PRUNER);
        false
    };
    let mut deleted = 0;
    while pushers.load(Ordering::SeqCst) > 0 {
        let limits =
            CallLimits { deadline: Instant::now() + Duration::from_secs(60), is_cancelled: &is_cancelled };
        match prune(store, false, &|_| {}, limits) {
            Ok(pruned) => deleted += pruned.deleted,
            // The prune fails if reading its roots takes too long.
            Err(Error::Local(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    deleted
}

/// Runs the schedule of a seed, and returns the number of deleted objects.
fn run(seed: u64, is_plain: bool) -> u64 {
    let memory = Arc::new(MemoryStore::default());
    let (_, calm) = user(&memory);
    push_plain(&calm, &device(&mut Rng::new(seed)), "kept").unwrap();
    let state = State { rng: Rng::new(seed), live: [true; PUSHERS + 1], current: PRUNER };
    let turns = Turns {
        state: Mutex::new(state),
        changed: Condvar::new(),
        memory: Arc::clone(&memory),
        looks: Arc::default(),
    };
    let turns = Arc::new(turns);
    let (rules, pruning) = user(&memory);
    if is_plain {
        rules.disable_conditional_delete();
        let turns = Arc::clone(&turns);
        rules.set_fault_rule(move |call| {
            if call.method == Method::Head {
                turns.look();
            }
            Effect::Pass
        });
    }
    let pushers = AtomicUsize::new(PUSHERS);
    let (deleted, shown) = std::thread::scope(|scope| {
        let (turns, pushers) = (&*turns, &pushers);
        let pruner = scope.spawn(move || {
            let _actor = Actor { turns, number: PRUNER, pushers };
            pruner(turns, &pruning, pushers)
        });
        let memory = &memory;
        let started = (1..=PUSHERS).map(|actor| {
            scope.spawn(move || {
                let user = user(memory);
                let _actor = Actor { turns, number: actor, pushers };
                pusher(turns, actor, &user, seed * 10 + actor as u64)
            })
        });
        let started: Vec<_> = started.collect();
        let deleted = pruner.join().unwrap();
        (deleted, started.into_iter().map(|pusher| pusher.join().unwrap()).collect::<Vec<_>>())
    });
    let calm = Arc::new(calm);
    for (tag, device) in shown.into_iter().flatten() {
        let name = calm.tag(&tag, soon()).unwrap().unwrap().tag.manifest;
        let limits = CallLimits::within(Duration::from_secs(1));
        let config = freestone_store::image::Config { timeout: Duration::from_secs(1), ..CONFIG };
        let image = freestone_store::image::Image::open(Arc::clone(&calm), None, name, config, limits);
        let image = image.unwrap_or_else(|error| panic!("schedule {seed}, plain {is_plain}: {tag}: {error}"));
        let mut page = vec![0; PAGE];
        for chunk in 0..CHUNKS {
            let read = image.read_at((chunk * CHUNK_BYTES) as u64, &mut page);
            let why = || image.stat().last_error.unwrap_or_default();
            assert!(read.is_ok(), "schedule {seed}, plain {is_plain}: {tag} has lost a chunk: {}", why());
        }
        assert!(content(&image) == content(&device), "schedule {seed}, plain {is_plain}: {tag}");
    }
    deleted
}

#[test]
fn random_schedules_of_pushes_and_prunes_lose_nothing() {
    for is_plain in [false, true] {
        let deleted: u64 = (0..SCHEDULES).map(|seed| run(seed, is_plain)).sum();
        assert!(deleted > SCHEDULES, "{deleted} objects were deleted in all schedules");
    }
}

/// A prune whose roots are nearly stale checks chunks that a push has reused. The chunks are 26 minutes old
/// when the push finds them, and an hour old when the prune checks them. No other manifest refers to them, as
/// the push that wrote them was cut off.
#[test]
fn chunk_reused_late_survives_prune_with_older_roots() {
    let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
    let memory = Arc::new(MemoryStore::default());
    let (_, calm) = user(&memory);
    push_plain(&calm, &mixed(300, 7), "kept").unwrap();
    let device = mixed(300, 1);
    let (cut, first) = user(&memory);
    cut_off(&cut);
    push_plain(&first, &device, "b").unwrap_err();
    memory.advance_clock(minutes(26));
    let ((slow, pushing), (paused, pruning)) = (user(&memory), user(&memory));
    let ((start, started), (arrive, arrived), (resume, resumed)) = (channel(), channel(), channel());
    let (arrived, resumed) = (Mutex::new(arrived), Mutex::new(resumed));
    let clock = Arc::clone(&memory);
    slow.set_fault_rule(move |call| {
        if call.method == Method::Put && call.key.starts_with("manifests/") {
            clock.advance_clock(minutes(25));
            start.send(()).unwrap();
            arrived.lock().unwrap().recv().unwrap();
        }
        Effect::Pass
    });
    paused.set_fault_rule(move |call| {
        // When the prune lists the first chunks, it has read its roots.
        if call.method == Method::List && call.key == "chunks/00/" {
            arrive.send(()).unwrap();
            resumed.lock().unwrap().recv().unwrap();
        }
        Effect::Pass
    });
    std::thread::scope(|scope| {
        let pruning = &pruning;
        let pruner = scope.spawn(move || {
            started.recv().unwrap();
            prune(pruning, false, &|_| {}, soon()).unwrap()
        });
        push_plain(&pushing, &device, "b").unwrap();
        memory.advance_clock(minutes(9) + Duration::from_secs(30));
        resume.send(()).unwrap();
        pruner.join().unwrap();
    });
    assert!(content(&image(&Arc::new(calm), None, "b")) == content(&device));
}
