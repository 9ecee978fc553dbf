//! A power that goes off by itself when so many writes or flushes were answered. From then on
//! nothing is done and nothing answered, until somebody cuts the power.
//!
//! While it counts, every request takes the lock here, so the count is exact whoever sends them. A
//! request takes its number when it comes; one that fails, or is only tried, gives it back. Behind
//! the last one nothing is let in: the device has had so many, and no more.

use std::fmt;
use std::mem;

use freestone_core::device::{Completion, Error, IoBuf, Op, Request, Result};
use freestone_core::sync::{AtomicU32, Mutex, Ordering::SeqCst};

/// When the power goes off by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// After so many more requests that change content: writes, zeroes, discards.
    Writes(u64),
    /// After so many more flushes.
    Flushes(u64),
}

impl After {
    const fn counts(self, op: Op) -> bool {
        match self {
            Self::Writes(_) => matches!(op, Op::Write | Op::WriteZeroes | Op::Discard),
            Self::Flushes(_) => matches!(op, Op::Flush),
        }
    }

    const fn left(&mut self) -> &mut u64 {
        match self {
            Self::Writes(left) | Self::Flushes(left) => left,
        }
    }
}

impl fmt::Display for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Writes(count) | Self::Flushes(count)) = self;
        let what = if matches!(self, Self::Writes(_)) { "write" } else { "flush" };
        let more = match (count, self) {
            (1, _) => "",
            (_, Self::Writes(_)) => "s",
            (_, Self::Flushes(_)) => "es",
        };
        write!(f, "{count} {what}{more}")
    }
}

/// What is done at the moment.
pub type Then = Box<dyn FnOnce() + Send>;

/// A request that waits.
pub type Held = (Request, IoBuf, Completion);

#[derive(Default)]
pub struct Countdown {
    /// 1: not every request may go on. Changed under the lock.
    runs: AtomicU32,
    /// Lock order: last. Held for a look or a change.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    phase: Phase,
    /// Numbers the countdowns: what was let in by an earlier one counts for nothing.
    round: u64,
    /// Requests that took a number and are not answered.
    running: u64,
    held: Vec<Held>,
    /// A return to the past has failed half way: the power stays off until one succeeds.
    half_set_back: bool,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    /// What can still be let in.
    Counting(After, Then),
    /// The moment has come: requests wait.
    Off,
    /// The power is being cut: requests are answered `Gone`.
    Gone,
}

/// Whether a request may go on.
pub enum Pass {
    Free,
    /// It took a number, in this round.
    Counted(u64),
    Wait,
    Gone,
}

impl State {
    fn enter(&mut self, op: Op) -> Pass {
        match &mut self.phase {
            Phase::Idle => Pass::Free,
            Phase::Gone => Pass::Gone,
            Phase::Off => Pass::Wait,
            Phase::Counting(after, _) => match (after.counts(op), after.left()) {
                // The last ones are running.
                (_, 0) => Pass::Wait,
                (true, left) => {
                    *left -= 1;
                    self.running += 1;
                    Pass::Counted(self.round)
                }
                (false, _) => Pass::Free,
            },
        }
    }
}

impl Countdown {
    /// Whether requests have to ask.
    pub fn runs(&self) -> bool {
        self.runs.load(SeqCst) != 0
    }

    /// How many are left.
    pub fn left(&self) -> Option<After> {
        let state = self.state.lock();
        let Phase::Counting(mut after, _) = state.phase else { return None };
        *after.left() += state.running;
        Some(after)
    }

    /// Begins to count.
    ///
    /// # Errors
    /// [`Error::Gone`]: the power is just going off.
    pub fn begin(&self, after: After, then: Then) -> Result<()> {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Off | Phase::Gone) {
            return Err(Error::Gone);
        }
        state.phase = Phase::Counting(after, then);
        state.round += 1;
        state.running = 0;
        self.runs.store(1, SeqCst);
        Ok(())
    }

    /// From now on requests are answered `Gone`, as are those that are returned.
    pub fn let_go(&self) -> Vec<Held> {
        let mut state = self.state.lock();
        state.phase = Phase::Gone;
        self.runs.store(1, SeqCst);
        mem::take(&mut state.held)
    }

    /// Nothing is counted any more. What is returned can go on.
    pub fn stop(&self) -> Vec<Held> {
        let mut state = self.state.lock();
        if !state.half_set_back {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
        mem::take(&mut state.held)
    }

    /// The device is half set back. As [`let_go`](Self::let_go), until [`set_whole`](Self::set_whole).
    pub fn stay_off(&self) -> Vec<Held> {
        self.state.lock().half_set_back = true;
        self.let_go()
    }

    /// The device is as it was at one moment; the power may be on again.
    pub fn set_whole(&self) {
        let mut state = self.state.lock();
        if mem::take(&mut state.half_set_back) {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
    }

    /// Returns true if a return to the past has failed half way and none has succeeded since.
    pub fn is_half_set_back(&self) -> bool {
        self.state.lock().half_set_back
    }

    /// Whether a request that is tried may go on.
    pub fn enter(&self, op: Op) -> Pass {
        self.state.lock().enter(op)
    }

    /// Whether one that is submitted may; keeps one that has to wait.
    pub fn enter_or_hold(&self, held: &mut Option<Held>) -> Pass {
        let mut state = self.state.lock();
        let pass = held.as_ref().map_or(Pass::Gone, |(request, ..)| state.enter(request.op));
        if matches!(pass, Pass::Wait) {
            state.held.extend(held.take());
        }
        pass
    }

    /// A request that took a number in `round` is `done`, or gives it back. Returns what is to be
    /// called, once the power is off, or what can go on.
    pub fn leave(&self, round: u64, done: bool) -> (Option<Then>, Vec<Held>) {
        let mut state = self.state.lock();
        if state.round != round {
            return (None, Vec::new());
        }
        state.running -= 1;
        let running = state.running;
        let Phase::Counting(after, _) = &mut state.phase else { return (None, Vec::new()) };
        *after.left() += u64::from(!done);
        match *after.left() {
            0 if running > 0 => (None, Vec::new()),
            0 => (mem::replace(&mut state.phase, Phase::Off).then(), Vec::new()),
            _ => (None, mem::take(&mut state.held)),
        }
    }
}

impl Phase {
    fn then(self) -> Option<Then> {
        if let Self::Counting(_, then) = self { Some(then) } else { None }
    }
}
