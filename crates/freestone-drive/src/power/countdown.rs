//! Countdown that switches the simulated power off after a number of writes or flushes. Later
//! requests neither run nor complete, until the power cut takes effect and fails them.
//!
//! During the countdown every request takes the countdown's lock, so the count is exact with any
//! number of submitters. A request takes a number on arrival, and returns the number if it fails or
//! `try_io` does not complete it. No request is admitted after the last number, so exactly that
//! many requests run.

use std::fmt;
use std::mem;

use freestone_core::device::{Completion, Error, IoBuf, Op, Request, Result};
use freestone_core::sync::{AtomicU32, Mutex, Ordering::SeqCst};

/// Number of requests after which the power goes off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutTrigger {
    /// The power goes off after this many further writes, write zeroes or discards.
    Writes(u64),
    /// The power goes off after this many further flushes.
    Flushes(u64),
}

impl CutTrigger {
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

impl fmt::Display for CutTrigger {
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

/// Action that runs when the countdown ends and the power goes off.
pub type PowerOffAction = Box<dyn FnOnce() + Send>;

pub type HeldRequest = (Request, IoBuf, Completion);

#[derive(Default)]
pub struct Countdown {
    /// 1 while requests must call [`enter`](Self::enter), else 0. Changed under the lock of
    /// `state`.
    runs: AtomicU32,
    /// Lock order: innermost. Held for a check or a change of the state.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    phase: Phase,
    /// Number of the current countdown. Requests admitted by an earlier countdown do not count.
    round: u64,
    /// Number of requests in flight that took a number.
    running: u64,
    held: Vec<HeldRequest>,
    /// True if a visit (restoring the device to a point of the recording) failed midway. The power
    /// stays off until a visit succeeds.
    partly_restored: bool,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    /// Remaining numbers of the running countdown, and the action at its end.
    Counting(CutTrigger, PowerOffAction),
    /// The countdown ended: new requests are held.
    Off,
    /// The power is being cut, or the device is partly restored: requests fail with `Gone`.
    Gone,
}

/// Decision about a new request.
pub enum Admission {
    Free,
    /// The request runs and took a number in the countdown with this round.
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
                // All numbers are taken. The last counted requests are still in flight.
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
    pub fn is_running(&self) -> bool {
        self.runs.load(SeqCst) != 0
    }

    /// Returns the remaining number of requests, including counted requests in flight, or `None`
    /// without a countdown.
    pub fn left(&self) -> Option<CutTrigger> {
        let state = self.state.lock();
        let Phase::Counting(mut after, _) = state.phase else { return None };
        *after.left() += state.running;
        Some(after)
    }

    /// Starts a countdown, replacing a running one. `then` runs when the power goes off.
    ///
    /// # Errors
    /// [`Error::Gone`] if the power is already off.
    pub fn begin(&self, after: CutTrigger, then: PowerOffAction) -> Result<()> {
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

    /// Makes new requests fail with `Gone`. Returns the held requests, which the caller must fail,
    /// too.
    pub fn start_failing(&self) -> Vec<HeldRequest> {
        let mut state = self.state.lock();
        state.phase = Phase::Gone;
        self.runs.store(1, SeqCst);
        mem::take(&mut state.held)
    }

    /// Cancels the countdown. Returns the held requests, which the caller must resubmit.
    pub fn stop(&self) -> Vec<HeldRequest> {
        let mut state = self.state.lock();
        if !state.partly_restored {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
        mem::take(&mut state.held)
    }

    /// Marks the device as partly restored. New requests fail with `Gone` until
    /// [`set_consistent`](Self::set_consistent). Returns the held requests, which the caller must
    /// fail, too.
    pub fn stay_off(&self) -> Vec<HeldRequest> {
        self.state.lock().partly_restored = true;
        self.start_failing()
    }

    /// Marks the device as consistent again, so that requests are admitted. No effect if the device
    /// was not partly restored.
    pub fn set_consistent(&self) {
        let mut state = self.state.lock();
        if mem::take(&mut state.partly_restored) {
            state.phase = Phase::Idle;
            self.runs.store(0, SeqCst);
        }
    }

    /// Returns true if a visit failed midway and no visit has succeeded since.
    pub fn is_partly_restored(&self) -> bool {
        self.state.lock().partly_restored
    }

    pub fn enter(&self, op: Op) -> Admission {
        self.state.lock().enter(op)
    }

    /// Decides about a submitted request. Moves the request out of `held` into the list of held
    /// requests if it must wait.
    pub fn enter_or_hold(&self, held: &mut Option<HeldRequest>) -> Admission {
        let mut state = self.state.lock();
        let pass = held.as_ref().map_or(Admission::Gone, |(request, ..)| state.enter(request.op));
        if matches!(pass, Admission::Wait) {
            state.held.extend(held.take());
        }
        pass
    }

    /// Ends a request that took a number in `round`. A request that is not `done` returns its
    /// number. Returns the action to run if the power goes off now, and the held requests to
    /// resubmit.
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
