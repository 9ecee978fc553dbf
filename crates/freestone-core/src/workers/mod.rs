//! One worker a CPU, for the whole process: whoever reads a queue of requests hands pieces of work
//! on to them, so that one queue uses several CPUs.
//!
//! A worker takes what it can do without waiting for a disk. What is handed on begins soon or not
//! at all: each worker for which there is a CPU has one piece at hand and a few that wait, and beyond
//! that the reader does its next piece itself. So there is no long line in which anybody could
//! starve, and where readers keep the CPUs busy they do their own work.

#[cfg(not(loom))]
mod costs;
#[cfg(all(loom, test))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::pin::wait;
#[cfg(not(loom))]
use crate::plug::Plug;
use crate::sync::{Arc, AtomicU32, Condvar, LazyLock, Mutex, Ordering, thread};

#[cfg(not(loom))]
pub use costs::{Began, Costs, MIN_BYTES};

/// A piece of work.
pub type Piece = Box<dyn FnOnce() + Send>;

/// Pieces that are not dear, of which a worker does so many before it tells of them: who waits for
/// their answers is woken once.
const TOLD_AT_ONCE: usize = 4;
/// Pieces for each worker that has a CPU: the one that it does, and the next ones, so that it has some
/// while the reader does a piece itself or waits for its client's socket.
const PIECES_EACH: u32 = if cfg!(loom) { 2 } else { 4 };

/// Threads that do pieces of work in the order in which they came. A clone is another handle on the
/// same ones.
#[derive(Debug, Clone)]
pub struct Workers(Arc<Shared>);

/// Lock order: `state` is innermost. Pieces run, and are dropped, with nothing held.
struct Shared {
    cpus: u32,
    state: Mutex<State>,
    ready: Condvar,
    /// Pieces that are handed on and not done, written under `state`; read without, as a hint.
    pieces: AtomicU32,
    /// Readers that do large requests themselves.
    at_work: AtomicU32,
}

#[derive(Default)]
struct State {
    /// Each, and whether it is dear.
    waiting: VecDeque<(Piece, bool)>,
    /// Threads that sleep, and those that were told to wake up and have not yet.
    asleep: usize,
    waking: usize,
    started: usize,
    stop: bool,
}

impl State {
    /// Threads that take pieces, or are about to.
    fn active(&self) -> usize {
        self.started - self.asleep
    }
}

static PROCESS: LazyLock<Workers> =
    LazyLock::new(|| Workers::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get)));

impl Workers {
    /// Those of the process.
    pub fn process() -> &'static Self {
        &PROCESS
    }

    /// For a machine of so many CPUs, on one of which the reader runs. Each is started when there is
    /// a piece for it.
    pub fn new(cpus: usize) -> Self {
        Self(Arc::new(Shared {
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            state: Mutex::default(),
            ready: Condvar::new(),
            pieces: AtomicU32::new(0),
            at_work: AtomicU32::new(0),
        }))
    }

    /// Threads that the caller starts, each with [`run`](Self::run).
    #[cfg(all(loom, test))]
    fn started(threads: usize) -> Self {
        let workers = Self::new(threads + 1);
        workers.0.state.lock().started = threads;
        workers
    }

    /// Whether a piece of the calling reader would be taken now.
    #[inline]
    pub fn has_room(&self) -> bool {
        // Relaxed: hints; whether a piece is taken is seen under the lock.
        let (pieces, at_work) =
            (self.0.pieces.load(Ordering::Relaxed), self.0.at_work.load(Ordering::Relaxed));
        pieces < PIECES_EACH * self.0.cpus.saturating_sub(1 + at_work)
    }

    /// Whether a worker is awake, so that handing a piece on wakes none.
    #[inline]
    pub fn are_awake(&self) -> bool {
        // Relaxed: a hint.
        self.0.pieces.load(Ordering::Relaxed) > 0
    }

    /// The calling reader does a large request itself, until what is returned is dropped.
    pub fn work_beside(&self) -> AtWork {
        // Relaxed: a hint.
        self.0.at_work.fetch_add(1, Ordering::Relaxed);
        AtWork(Arc::clone(&self.0))
    }

    /// Hands a piece on. For one that is `dear` a worker is woken; others are done by those that are
    /// awake, if there are any.
    ///
    /// # Errors
    /// There is no room: the caller does it.
    pub fn offer(&self, piece: Piece, dear: bool) -> Result<(), Piece> {
        let mut state = self.0.state.lock();
        if state.stop || !self.has_room() {
            return Err(piece);
        }
        // Waking costs as much as a small piece, and who is awake will be there for it soon, unless
        // each has one before it.
        let more = dear || state.active() == 0 || state.waiting.len() >= state.active();
        if more
            && state.asleep == 0
            && (state.started as u32) < self.0.cpus.saturating_sub(1)
            && self.start().is_ok()
        {
            state.started += 1;
        }
        if state.started == 0 {
            return Err(piece);
        }
        state.waiting.push_back((piece, dear));
        // Relaxed: under the lock.
        self.0.pieces.fetch_add(1, Ordering::Relaxed);
        let wake = more && state.asleep > 0;
        if wake {
            state.asleep -= 1;
            state.waking += 1;
        }
        drop(state);
        if wake {
            self.0.ready.notify_one();
        }
        Ok(())
    }

    /// The threads end when nothing waits any more; nothing more is taken.
    pub fn stop(&self) {
        self.0.state.lock().stop = true;
        self.0.ready.notify_all();
    }

    fn start(&self) -> std::io::Result<()> {
        let workers = self.clone();
        thread::Builder::new().name("worker".into()).spawn(move || workers.run()).map(drop)
    }

    fn run(&self) {
        self.0.run();
    }
}

impl Shared {
    fn run(&self) {
        while let Some(piece) = self.next() {
            #[cfg(not(loom))]
            let _plug = Plug::start();
            let (mut next, mut left) = (Some(piece), TOLD_AT_ONCE);
            while let Some((piece, dear)) = next {
                // A panic was reported by its hook; the piece's request is answered "gone" by being
                // dropped.
                let _ = catch_unwind(AssertUnwindSafe(piece));
                left = if dear { 0 } else { left - 1 };
                let mut state = self.state.lock();
                // Relaxed: under the lock.
                self.pieces.fetch_sub(1, Ordering::Relaxed);
                next = if left > 0 { state.waiting.pop_front() } else { None };
            }
        }
    }

    /// The next piece; waits for one. `None` when there will be none.
    fn next(&self) -> Option<(Piece, bool)> {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = state.waiting.pop_front() {
                return Some(next);
            }
            if state.stop {
                state.started -= 1;
                return None;
            }
            state.asleep += 1;
            state = wait(&self.ready, state);
            // One that woke up by itself takes the place of one that was told to.
            if state.waking > 0 {
                state.waking -= 1;
            } else {
                state.asleep -= 1;
            }
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "for {} CPUs", self.cpus)
    }
}

/// A reader that does a large request itself.
#[derive(Debug)]
pub struct AtWork(Arc<Shared>);

impl Drop for AtWork {
    fn drop(&mut self) {
        // Relaxed: a hint.
        self.0.at_work.fetch_sub(1, Ordering::Relaxed);
    }
}
