//! Scheduler of the simulation.
//!
//! Each task is a thread. One task runs; all others sleep until they are selected. A number (`key`)
//! matches a wait with its wake-up: the address of a lock, condition variable or channel. Keys are
//! only compared, so the values of keys do not affect the run.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::CPUS;

/// Virtual time between two scheduling points, in nanoseconds.
const POINT_NANOS: u64 = 100;
/// Virtual time of a yield in nanoseconds, long enough that the clock advances in polling loops.
const YIELD_NANOS: u64 = 20_000;
/// Exit status of a process whose simulation is stuck.
const STUCK_STATUS: i32 = 3;

/// Parameters of a simulation run.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Seed of all random decisions of the run.
    pub seed: u64,
    /// The value N of the probability 1/N that another task is selected at a scheduling point; at
    /// least 1.
    pub switch_one_in: u64,
    /// Maximum number of scheduling points. A run with more is reported as stuck.
    pub points_max: u64,
}

/// Result of a simulation run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Hash of the sequence of tasks and times, which is equal for identical runs.
    pub digest: u64,
    /// Number of scheduling points passed.
    pub points: u64,
    /// Number of task switches.
    pub switches: u64,
    /// Virtual duration of the run.
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
    /// Task that must print its stack, as the run is stuck.
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
    /// State of the current task. The first thread local of a task is dropped last, so drops of
    /// other thread locals still run as part of the task.
    static CURRENT: Current = const { Current { task: Cell::new(None), cpu: Cell::new(0) } };
}

struct Current {
    task: Cell<Option<usize>>,
    cpu: Cell<usize>,
}

impl Drop for Current {
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

/// Returns the number of the calling task, or `None` outside a simulation.
pub(super) fn current_task() -> Option<usize> {
    CURRENT.try_with(|me| me.task.get()).ok().flatten()
}

/// Returns the simulated CPU of the calling task, which sometimes changes; 0 outside a simulation.
pub fn cpu() -> usize {
    CURRENT.try_with(|me| me.cpu.get()).unwrap_or(0)
}

/// Runs `work` as the first task of a simulation. A process can run only one simulation, because
/// statics outlive it. Tasks that still exist when `work` returns never continue.
///
/// # Panics
/// Panics if the process has run a simulation before, or if `work` panics.
pub fn run<T>(config: Config, work: impl FnOnce() -> T) -> (T, Summary) {
    {
        let mut state = lock();
        assert!(state.is_none(), "a process can run one simulation only");
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
        let first = state.as_mut().expect("just set").add("main");
        state.as_mut().expect("just set").tasks[first].status = Status::Running;
        CURRENT.with(|me| me.task.set(Some(first)));
    }
    let result = work();
    let summary = summary();
    CURRENT.with(|me| me.task.set(None));
    (result, summary)
}

/// Returns the result of the simulation run up to now.
///
/// # Panics
/// Panics if the process has not started a simulation.
pub fn summary() -> Summary {
    let mut state = lock();
    let state = state.as_mut().expect("no simulation is running");
    Summary {
        digest: state.digest,
        points: state.points,
        switches: state.switches,
        elapsed: Duration::from_nanos(state.nanos),
    }
}

/// Returns the virtual time in nanoseconds; `None` outside a simulation. Every call advances the
/// time a little.
pub(super) fn nanos() -> Option<u64> {
    current_task()?;
    let mut state = lock();
    let state = state.as_mut()?;
    state.nanos += POINT_NANOS;
    Some(state.nanos)
}

/// Returns a random number that depends on the seed; 0 outside a simulation.
pub fn random_u64() -> u64 {
    match current_task() {
        Some(_) => running(&mut lock()).draw(u64::MAX),
        None => 0,
    }
}

/// Passes a scheduling point, at which another task may be selected to run.
pub fn pass_point() {
    let Some(me) = current_task() else { return };
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    if state.draw(state.config.switch_one_in) == 0 {
        state.tasks[me].status = Status::Ready;
        switch_task(locked, me);
    }
}

/// Lets other tasks run first. Returns false outside a simulation.
pub(super) fn yield_now() -> bool {
    let Some(me) = current_task() else { return false };
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    // The clock must advance in polling loops.
    state.nanos += YIELD_NANOS;
    state.tasks[me].status = Status::Ready;
    switch_task(locked, me);
    true
}

/// Waits for [`wake`] with the same key, at most for `most`. Returns true on timeout. The caller
/// must be a task.
pub(super) fn block(key: usize, most: Option<Duration>) -> bool {
    let me = current_task().expect("only a task waits in a simulation");
    let mut locked = lock();
    let state = running(&mut locked);
    state.count();
    let until = most.map(|most| {
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        state.nanos.saturating_add(nanos)
    });
    state.tasks[me].status = Status::Blocked { key, until };
    state.tasks[me].timed_out = false;
    switch_task(locked, me);
    running(&mut lock()).tasks[me].timed_out
}

/// Wakes all tasks that wait for this key, or (without `all`) one that the seed selects.
pub(super) fn wake(key: usize, all: bool) {
    if current_task().is_none() {
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

/// Returns true with probability 1/`of`; false outside a simulation.
pub(super) fn one_in(of: u64) -> bool {
    current_task().is_some() && running(&mut lock()).draw(of) == 0
}

/// Adds a task and returns its number; `None` outside a simulation. The thread of the task must
/// call [`enter`].
pub(super) fn add(name: &str) -> Option<usize> {
    current_task()?;
    Some(running(&mut lock()).add(name))
}

/// Makes the calling thread the thread of this task, and waits until the task is selected.
pub(super) fn enter(task: usize) {
    CURRENT.with(|me| {
        me.task.set(Some(task));
        me.cpu.set(task % CPUS);
    });
    await_turn(lock(), task);
}

/// Removes a task whose thread could not be started.
pub(super) fn remove_unstarted(task: usize) {
    running(&mut lock()).tasks[task].status = Status::Done;
}

/// Returns the key by which tasks wait for the end of a task.
pub(super) fn end_key(task: usize) -> usize {
    // The value cannot be the key of another object, as no address is this small.
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
        if matches!(task.status, Status::Blocked { key, .. } if key == end_key(me)) {
            task.status = Status::Ready;
        }
    }
    match state.choose_next() {
        Some(next) => state.give_turn(next),
        None => exit_stuck(locked, None, "no task can run"),
    }
}

fn running(locked: &mut Locked) -> &mut ScheduleState {
    locked.as_mut().expect("no simulation is running")
}

/// Selects the next task to run, and returns when `me` is selected again.
fn switch_task(mut locked: Locked, me: usize) {
    let state = running(&mut locked);
    if state.points > state.config.points_max {
        let why = format!("not finished after {} points", state.points);
        exit_stuck(locked, Some(me), &why);
    }
    let Some(next) = state.choose_next() else {
        exit_stuck(locked, Some(me), "no task can run");
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
                let _ = CURRENT.try_with(|me| me.cpu.set(cpu));
            }
            return;
        }
        if state.stuck == Some(me) {
            print_task(state, me);
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

    /// Selects the next task to run. If all tasks wait, advances the time to the earliest deadline.
    /// Returns `None` if no task can ever run.
    fn choose_next(&mut self) -> Option<usize> {
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

/// Prints the reason why the run is stuck and the stacks of all waiting tasks, and exits the
/// process.
fn exit_stuck(mut locked: Locked, me: Option<usize>, why: &str) -> ! {
    let state = running(&mut locked);
    eprintln!("stuck: {why}; seed {}, {} points, {} ns", state.config.seed, state.points, state.nanos);
    if let Some(me) = me {
        print_task(state, me);
    }
    for task in 0..state.tasks.len() {
        let state = running(&mut locked);
        if Some(task) == me || matches!(state.tasks[task].status, Status::Done | Status::Running) {
            continue;
        }
        state.stuck = Some(task);
        state.tasks[task].turn.notify_all();
        let turn = Arc::clone(&state.tasks[task].turn);
        // The thread of the task may still be starting, so wait for its stack with a timeout.
        while running(&mut locked).stuck == Some(task) {
            let (relocked, waited) =
                turn.wait_timeout(locked, Duration::from_secs(5)).unwrap_or_else(PoisonError::into_inner);
            locked = relocked;
            if waited.timed_out() {
                break;
            }
        }
    }
    // `exit()` drops the thread locals of this thread, which must not count as the end of the task.
    let _ = CURRENT.try_with(|me| me.task.set(None));
    process::exit(STUCK_STATUS);
}

fn print_task(state: &ScheduleState, task: usize) {
    let Task { name, status, .. } = &state.tasks[task];
    let state_text = match status {
        Status::Blocked { until: Some(until), .. } => format!("waiting until {until} ns"),
        Status::Blocked { .. } => "waiting".to_owned(),
        _ => "ready".to_owned(),
    };
    eprintln!("\ntask {task}, {name}, {state_text}:\n{}", Backtrace::force_capture());
}
