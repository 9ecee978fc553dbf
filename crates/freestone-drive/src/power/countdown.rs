//! Countdown that switches the power off after a number of writes or flushes. From then on requests
//! neither run nor complete, until the power is cut.
//!
//! During the countdown every request takes this lock, so the count is exact with any number of
//! submitters. A request takes a number when it comes, and returns it if it fails or a try does not
//! complete it. No request enters after the last number: the device gets exactly that many.

use std::fmt;
use std::mem;

use freestone_core::device::{Completion, Error, IoBuf, Op, Request, Result};
use freestone_core::sync::{AtomicU32, Mutex, Ordering::SeqCst};

/// Event after which the power goes off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// After this many further writes, write zeroes or discards.
    Writes(u64),
    /// After this many further flushes.
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

/// Action that runs when the power goes off.
pub type PowerOffAction = Box<dyn FnOnce() + Send>;

pub type HeldRequest = (Request, IoBuf, Completion);

#[derive(Default)]
pub struct Countdown {
    /// 1 while requests must be checked. Changed under the lock.
    runs: AtomicU32,
    /// Lock order: last. Held for a check or a change.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    phase: Phase,
    /// Number of the countdown. Requests admitted by an earlier one do not count.
    round: u64,
    /// Requests in flight that took a number.
    running: u64,
    held: Vec<HeldRequest>,
    /// A visit failed midway: the power stays off until one succeeds.
    half_set_back: bool,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    /// Remaining numbers, and the action at the end.
    Counting(After, PowerOffAction),
    /// The countdown elapsed: requests wait.
    Off,
    /// The power is being cut: requests fail with `Gone`.
    Gone,
}

/// Decision about a request.
pub enum Admission {
    Free,
    /// The request took a number in this round.
    Counted(u64),
    Wait,
    Gone,
}

impl State {
    fn enter(&mut self, op: Op) -> Admission {
        match &mut self.phase {
            Phase::Idle => Admission::Free,
            Phase::Gone => Admission::Gone,
            Phase::Off => Admission::Wait,
            Phase::Counting(after, _) => match (after.counts(op), after.left()) {
                // The last counted requests are in flight.
                (_, 0) => Admission::Wait,
                (true, left) => {
                    *left -= 1;
                    self.running += 1;
                    Admission::Counted(self.round)
                }
                (false, _) => Admission::Free,
            },
        }
    }
}

impl Countdown {
    /// Returns true if requests must call [`enter`](Self::enter).
    pub fn runs(&self) -> bool {
        self.runs.load(SeqCst) != 0
    }

    /// Returns the remaining number, including requests in flight.
    pub fn left(&self) -> Option<After> {
        let state = self.state.lock();
        let Phase::Counting(mut after, _) = state.phase else { return None };
        *after.left() += state.running;
        Some(after)
    }

    /// Starts a countdown.
    ///
    /// # Errors
    /// [`Error::Gone`] if the power is just going off.
    pub fn begin(&self, after: After, then: PowerOffAction) -> Result<()> {
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

    /// Lets requests fail with `Gone` from now on. Returns the held requests, which must fail, too.
    pub fn let_go(&self) -> Vec<HeldRequest> {
        let mut state = self.state.lock();
        state.phase = Phase::Gone;
        self.runs.store(1, SeqCst);
        mem::take(&mut state.held)
    }

    /// Cancels the countdown. Returns the held requests, which may continue.
    pub fn stop(&self) -> Vec<HeldRequest> {
        let mut state = self.state.lock();
        if !state.half_set_back {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
        mem::take(&mut state.held)
    }

    /// Marks the device as partly restored. Same effect as [`let_go`](Self::let_go), until
    /// [`set_consistent`](Self::set_consistent).
    pub fn stay_off(&self) -> Vec<HeldRequest> {
        self.state.lock().half_set_back = true;
        self.let_go()
    }

    /// Marks the device as consistent again. The power may be on.
    pub fn set_consistent(&self) {
        let mut state = self.state.lock();
        if mem::take(&mut state.half_set_back) {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
    }

    /// Returns true if a visit failed midway and none has succeeded since.
    pub fn is_half_set_back(&self) -> bool {
        self.state.lock().half_set_back
    }

    pub fn enter(&self, op: Op) -> Admission {
        self.state.lock().enter(op)
    }

    /// Decides about a submitted request, and holds it if it must wait.
    pub fn enter_or_hold(&self, held: &mut Option<HeldRequest>) -> Admission {
        let mut state = self.state.lock();
        let pass = held.as_ref().map_or(Admission::Gone, |(request, ..)| state.enter(request.op));
        if matches!(pass, Admission::Wait) {
            state.held.extend(held.take());
        }
        pass
    }

    /// Ends a request that took a number in `round`. The number is returned unless `done`. Returns
    /// the action if the power is off now, or the requests that may continue.
    pub fn finish(&self, round: u64, done: bool) -> (Option<PowerOffAction>, Vec<HeldRequest>) {
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
    fn then(self) -> Option<PowerOffAction> {
        if let Self::Counting(_, then) = self { Some(then) } else { None }
    }
}
