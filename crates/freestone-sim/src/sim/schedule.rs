//! Who runs.
//!
//! Each task is a thread of its own. One of them has the turn; all others sleep until it is theirs.
//! What makes a task wait, and what wakes it, are numbers (`key`): the address of a lock, of a
//! condition variable, of a channel. They are only compared, so that addresses do not matter.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::CPUS;

/// How much time passes from one point to the next.
const POINT_NANOS: u64 = 100;
/// How much passes when a task that has nothing to do lets others go first and there are none.
const YIELD_NANOS: u64 = 20_000;
/// Status of a process whose run got stuck.
const STUCK_STATUS: i32 = 3;

/// How a run is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Decides everything.
    pub seed: u64,
    /// At one in so many points another task may go on; at least 1.
    pub switch_one_in: u64,
    /// A run of more points than this is stuck.
    pub points_max: u64,
}

/// What a run came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// The same for two runs in which the same tasks took the same turns at the same times.
    pub digest: u64,
    /// Points that were passed.
    pub points: u64,
    /// Turns that went to another task.
    pub switches: u64,
    /// Virtual time.
    pub elapsed: Duration,
}

struct ScheduleState {
    config: Config,
    random: u64,
    nanos: u64,
    points: u64,
    switches: u64,
    digest: u64,
    tasks: Vec<Task>,
    /// Nobody can go on, and this task shows its stack.
    stuck: Option<usize>,
}

struct Task {
    name: String,
    status: Status,
    turn: Arc<Condvar>,
    timed_out: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    Ready,
    Running,
    Blocked { key: usize, until: Option<u64> },
    Done,
}

static STATE: Mutex<Option<ScheduleState>> = Mutex::new(None);

thread_local! {
    /// First of a task's own, so it is the last to be dropped: what other thread locals do when
    /// they are dropped is still in turn.
    static ME: Me = const { Me { task: Cell::new(None), cpu: Cell::new(0) } };
}

struct Me {
    task: Cell<Option<usize>>,
    cpu: Cell<usize>,
}

impl Drop for Me {
    fn drop(&mut self) {
        if let Some(me) = self.task.take() {
            finish(me);
        }
    }
}

type Locked = MutexGuard<'static, Option<ScheduleState>>;

fn lock() -> Locked {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The task that calls.
pub(super) fn me() -> Option<usize> {
    ME.try_with(|me| me.task.get()).ok().flatten()
}

/// The CPU that the task runs on; it is moved now and then. Of other threads 0.
pub fn cpu() -> usize {
    ME.try_with(|me| me.cpu.get()).unwrap_or(0)
}

/// Runs `work` as the first task of a simulation. A process has one simulation, as what is static
/// in it outlives it: tasks that are still there when `work` returns never go on.
///
/// # Panics
/// There was one before, or as `work` does.
pub fn run<T>(config: Config, work: impl FnOnce() -> T) -> (T, Summary) {
    {
        let mut state = lock();
        assert!(state.is_none(), "one simulation a process");
        *state = Some(ScheduleState {
            config,
            random: config.seed,
            nanos: 0,
            points: 0,
            switches: 0,
            digest: config.seed,
            tasks: Vec::new(),
            stuck: None,
        });
        let first = state.as_mut().expect("it was just made").add("main");
        state.as_mut().expect("it was just made").tasks[first].status = Status::Running;
        ME.with(|me| me.task.set(Some(first)));
    }
    let result = work();
    let summary = summary();
    ME.with(|me| me.task.set(None));
    (result, summary)
}

/// What the run came to so far.
///
/// # Panics
/// There is none.
pub fn summary() -> Summary {
    let mut state = lock();
    let state = state.as_mut().expect("a task runs in a simulation");
    Summary {
        digest: state.digest,
        points: state.points,
        switches: state.switches,
        elapsed: Duration::from_nanos(state.nanos),
    }
}

/// The virtual time in nanoseconds, which goes on a little with each look; `None` outside.
pub(super) fn nanos() -> Option<u64> {
    me()?;
    let mut state = lock();
    let state = state.as_mut()?;
    state.nanos += POINT_NANOS;
    Some(state.nanos)
}

/// A random number that the seed decides; outside of a simulation 0.
pub fn word() -> u64 {
    match me() {
        Some(_) => running(&mut lock()).draw(u64::MAX),
        None => 0,
    }
}

/// A place where another task may go on.
pub fn point() {
    let Some(me) = me() else { return };
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    if state.draw(state.config.switch_one_in) == 0 {
        state.tasks[me].status = Status::Ready;
        hand_over(locked, me);
    }
}

/// Others go first. False outside of a simulation.
pub(super) fn give_way() -> bool {
    let Some(me) = me() else { return false };
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    // Whoever polls for something that only time brings must see it pass.
    state.nanos += YIELD_NANOS;
    state.tasks[me].status = Status::Ready;
    hand_over(locked, me);
    true
}

/// Waits for [`wake`] with this key, at most so long; true where that time has passed. Only for a
/// task.
pub(super) fn block(key: usize, most: Option<Duration>) -> bool {
    let me = me().expect("only a task waits in a simulation");
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    let until = most.map(|most| {
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        state.nanos.saturating_add(nanos)
    });
    state.tasks[me].status = Status::Blocked { key, until };
    state.tasks[me].timed_out = false;
    hand_over(locked, me);
    running(&mut lock()).tasks[me].timed_out
}

/// Tasks that wait with this key go on: all, or one that the seed chooses.
pub(super) fn wake(key: usize, all: bool) {
    if me().is_none() {
        return;
    }
    let mut locked = lock();
    let Some(state) = locked.as_mut() else { return };
    let mut waiting: Vec<usize> = (0..state.tasks.len())
        .filter(
            |&task| matches!(state.tasks[task].status, Status::Blocked { key: other, .. } if other == key),
        )
        .collect();
    if !all && waiting.len() > 1 {
        let chosen = state.draw(waiting.len() as u64) as usize;
        waiting = vec![waiting[chosen]];
    }
    for task in waiting {
        state.tasks[task].status = Status::Ready;
    }
}

/// One in `of` times, as the seed decides.
pub(super) fn one_in(of: u64) -> bool {
    me().is_some() && running(&mut lock()).draw(of) == 0
}

/// A task that is to be started; its thread [`enter`]s.
pub(super) fn add(name: &str) -> Option<usize> {
    me()?;
    Some(running(&mut lock()).add(name))
}

/// The calling thread is this task from now on, and goes on when it has its turn.
pub(super) fn enter(task: usize) {
    ME.with(|me| {
        me.task.set(Some(task));
        me.cpu.set(task % CPUS);
    });
    await_turn(lock(), task);
}

/// A task whose thread could not be started.
pub(super) fn never_started(task: usize) {
    running(&mut lock()).tasks[task].status = Status::Done;
}

/// The key of a task's end.
pub(super) fn end_of(task: usize) -> usize {
    // No address is so small.
    task + 1
}

pub(super) fn is_done(task: usize) -> bool {
    running(&mut lock()).tasks[task].status == Status::Done
}

fn finish(me: usize) {
    let mut locked = lock();
    let Some(state) = locked.as_mut() else { return };
    state.tasks[me].status = Status::Done;
    for task in &mut state.tasks {
        if matches!(task.status, Status::Blocked { key, .. } if key == end_of(me)) {
            task.status = Status::Ready;
        }
    }
    match state.choose() {
        Some(next) => state.give_turn(next),
        None => stuck(locked, None, "nobody can go on"),
    }
}

fn running(locked: &mut Locked) -> &mut ScheduleState {
    locked.as_mut().expect("a task runs in a simulation")
}

/// The turn goes to whom the seed chooses; returns when it is `me`'s again.
fn hand_over(mut locked: Locked, me: usize) {
    let state = running(&mut locked);
    if state.points > state.config.points_max {
        let why = format!("no end after {} points", state.points);
        stuck(locked, Some(me), &why);
    }
    let Some(next) = state.choose() else {
        stuck(locked, Some(me), "nobody can go on");
    };
    if next == me {
        state.tasks[me].status = Status::Running;
        return;
    }
    state.give_turn(next);
    await_turn(locked, me);
}

fn await_turn(mut locked: Locked, me: usize) {
    loop {
        let state = running(&mut locked);
        if state.tasks[me].status == Status::Running {
            if state.draw(16) == 0 {
                let cpu = state.draw(CPUS as u64) as usize;
                let _ = ME.try_with(|me| me.cpu.set(cpu));
            }
            return;
        }
        if state.stuck == Some(me) {
            show(state, me);
            state.stuck = None;
            for task in &state.tasks {
                task.turn.notify_all();
            }
        }
        let turn = Arc::clone(&running(&mut locked).tasks[me].turn);
        locked = turn.wait(locked).unwrap_or_else(PoisonError::into_inner);
    }
}

impl ScheduleState {
    fn add(&mut self, name: &str) -> usize {
        self.tasks.push(Task {
            name: name.to_owned(),
            status: Status::Ready,
            turn: Arc::new(Condvar::new()),
            timed_out: false,
        });
        self.tasks.len() - 1
    }

    fn draw(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound.max(1)
    }

    fn count(&mut self) {
        self.points += 1;
        self.nanos += POINT_NANOS;
    }

    /// Who goes on. Where all wait, time passes until one need not any more.
    fn choose(&mut self) -> Option<usize> {
        loop {
            let now = self.nanos;
            for task in &mut self.tasks {
                if matches!(task.status, Status::Blocked { until: Some(until), .. } if until <= now) {
                    task.status = Status::Ready;
                    task.timed_out = true;
                }
            }
            let ready: Vec<usize> =
                (0..self.tasks.len()).filter(|&task| self.tasks[task].status == Status::Ready).collect();
            if !ready.is_empty() {
                return Some(ready[self.draw(ready.len() as u64) as usize]);
            }
            let deadlines = self.tasks.iter().filter_map(|task| match task.status {
                Status::Blocked { until, .. } => until,
                _ => None,
            });
            self.nanos = deadlines.min()?;
        }
    }

    fn give_turn(&mut self, next: usize) {
        self.switches += 1;
        for word in [next as u64, self.nanos, self.points] {
            self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
        self.tasks[next].status = Status::Running;
        self.tasks[next].turn.notify_all();
    }
}

/// Says why nobody goes on, with all stacks, and ends the process.
fn stuck(mut locked: Locked, me: Option<usize>, why: &str) -> ! {
    let state = running(&mut locked);
    eprintln!("stuck: {why}; seed {}, {} points, {} ns", state.config.seed, state.points, state.nanos);
    if let Some(me) = me {
        show(state, me);
    }
    for task in 0..state.tasks.len() {
        let state = running(&mut locked);
        if Some(task) == me || matches!(state.tasks[task].status, Status::Done | Status::Running) {
            continue;
        }
        state.stuck = Some(task);
        state.tasks[task].turn.notify_all();
        let turn = Arc::clone(&state.tasks[task].turn);
        // It may be a thread that is only just being started.
        while running(&mut locked).stuck == Some(task) {
            let (again, waited) =
                turn.wait_timeout(locked, Duration::from_secs(5)).unwrap_or_else(PoisonError::into_inner);
            locked = again;
            if waited.timed_out() {
                break;
            }
        }
    }
    // The end of the process drops what is this thread's own: that is no end of a task.
    let _ = ME.try_with(|me| me.task.set(None));
    process::exit(STUCK_STATUS);
}

fn show(state: &ScheduleState, task: usize) {
    let Task { name, status, .. } = &state.tasks[task];
    let waits = match status {
        Status::Blocked { until: Some(until), .. } => format!("waits until {until} ns"),
        Status::Blocked { .. } => "waits".to_owned(),
        _ => "could go on".to_owned(),
    };
    eprintln!("\ntask {task}, {name}, {waits}:\n{}", Backtrace::force_capture());
}
