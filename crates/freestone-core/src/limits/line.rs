//! Who waits for its turn, and who carries those on whose turn has come.
//!
//! # Protocol
//! * A line is on while it has rates, or somebody waits in it or is being carried on. Who finds it off
//!   goes by without a lock; it goes off under the lock, and only when the last one that waited has
//!   gone on. So nobody gets by who comes later.
//! * Who finds it on takes the lock, and pays. If somebody waits already, or is being carried on at
//!   that moment, it stands behind them.
//! * One thread at a time carries on. It takes the first one out under the lock, and has it go on
//!   without: until that is done others stand behind. Who finds that somebody carries on need not:
//!   that one looks again before it stops, under the lock under which it says that it does.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Arc, AtomicU32, Mutex, MutexGuard, Ordering};

/// What somebody has to pay before it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Operations.
    pub operations: u64,
    /// Bytes of data.
    pub bytes: u64,
}

/// Who waits.
pub trait Waits: Send + 'static {
    /// It has to. Called under a lock: it does next to nothing.
    fn waits(&mut self);
    /// Its turn has come.
    fn go(self);
    /// It never comes.
    fn gone(self);
}

/// What is paid by.
pub trait Pace: Send {
    /// Takes from what is owed as much as can be paid now. An error says how long it is until more can
    /// be.
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration>;
}

/// The line. Lock order: `state` is innermost; who goes on does so without it.
pub struct Line<J, P> {
    /// Not 0: who comes has to look. Written under `state`.
    on: AtomicU32,
    /// How many lines are on, of those that have this in common.
    any: Arc<AtomicU32>,
    state: Mutex<State<J, P>>,
}

struct State<J, P> {
    /// None: nobody pays.
    pace: Option<P>,
    waiting: VecDeque<(J, Cost)>,
    /// Somebody carries on.
    is_carried: bool,
    /// While there are any, nobody pays.
    lifted: usize,
    /// While there are any, who would have to pay is gone.
    ended: usize,
}

/// What came of one that came.
#[must_use]
pub enum Entered<J> {
    /// It goes on.
    Goes(J),
    /// Its turn does not come.
    Gone(J),
    /// It waits, and is the first: who carries on is to look again then.
    First(Duration),
    /// It waits behind others.
    Waits,
}

/// What is left to do for who carries on.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Nobody waits, or somebody else carries on.
    Nothing,
    /// To look again after this.
    After(Duration),
    /// To go on at once: others may have a turn before.
    Again,
}

/// Somebody carries on until this is dropped, also by a panic.
struct Carrying<'a, J: Waits, P: Pace>(&'a Line<J, P>);

impl<J: Waits, P: Pace> Drop for Carrying<'_, J, P> {
    fn drop(&mut self) {
        self.0.lock().is_carried = false;
    }
}

impl<J: Waits, P: Pace> Line<J, P> {
    /// Without rates; `any` counts it while it is on.
    pub fn new(any: Arc<AtomicU32>) -> Self {
        let state = State { pace: None, waiting: VecDeque::new(), is_carried: false, lifted: 0, ended: 0 };
        Self { on: AtomicU32::new(0), any, state: Mutex::new(state) }
    }

    /// Whether who comes has to look.
    #[inline]
    pub fn is_on(&self) -> bool {
        // Acquire: pairs with the Release in `settle`: who finds it off comes after all who waited.
        self.on.load(Ordering::Acquire) != 0
    }

    fn lock(&self) -> MutexGuard<'_, State<J, P>> {
        self.state.lock()
    }

    /// Comes, and pays or waits.
    pub fn enter(&self, mut job: J, mut owed: Cost) -> Entered<J> {
        if !self.is_on() {
            return Entered::Goes(job);
        }
        let mut state = self.lock();
        if state.ended > 0 {
            return Entered::Gone(job);
        }
        let is_first = state.waiting.is_empty() && !state.is_carried;
        let wait = if is_first { state.pay(&mut owed) } else { Err(Duration::ZERO) };
        let Err(wait) = wait else { return Entered::Goes(job) };
        job.waits();
        state.waiting.push_back((job, owed));
        if is_first { Entered::First(wait) } else { Entered::Waits }
    }

    /// Has those go on whose turn has come, `most` at once.
    pub fn carry_on(&self, most: usize) -> Next {
        {
            let mut state = self.lock();
            if state.is_carried {
                return Next::Nothing;
            }
            state.is_carried = true;
        }
        let carrying = Carrying(self);
        for _ in 0..most {
            let job = {
                let mut state = self.lock();
                match state.first_pays() {
                    Ok(Some(job)) => job,
                    // Under the lock under which was looked: who comes now is the first again.
                    Ok(None) => {
                        state.is_carried = false;
                        self.settle(&state);
                        std::mem::forget(carrying);
                        return Next::Nothing;
                    }
                    Err(wait) => {
                        state.is_carried = false;
                        std::mem::forget(carrying);
                        return Next::After(wait);
                    }
                }
            };
            job.go();
        }
        drop(carrying);
        Next::Again
    }

    /// Other rates from now on, also for those that wait. `make` is told whether any do. Somebody is to
    /// [carry on](Self::carry_on) after that.
    pub fn set(&self, make: impl FnOnce(bool) -> Option<P>) {
        let mut state = self.lock();
        state.pace = make(!state.waiting.is_empty());
        self.settle(&state);
    }

    /// Nobody pays, until it is taken back. Somebody is to [carry on](Self::carry_on) after that.
    pub fn lift(&self) {
        self.lock().lifted += 1;
    }

    /// See [`lift`](Self::lift).
    pub fn lay(&self) {
        self.lock().lifted -= 1;
    }

    /// Those that wait are gone, and those that come and would have to pay, until it is taken back.
    pub fn end(&self) {
        let waiting = {
            let mut state = self.lock();
            state.ended += 1;
            std::mem::take(&mut state.waiting)
        };
        self.leave(waiting);
    }

    /// See [`end`](Self::end).
    pub fn begin(&self) {
        self.lock().ended -= 1;
    }

    /// Those of the waiting are gone that are so.
    pub fn end_those(&self, are_so: impl Fn(&J) -> bool) {
        let gone = {
            let mut state = self.lock();
            let (gone, stay) =
                std::mem::take(&mut state.waiting).into_iter().partition(|(job, _)| are_so(job));
            state.waiting = stay;
            gone
        };
        self.leave(gone);
    }

    fn leave(&self, gone: VecDeque<(J, Cost)>) {
        for (job, _) in gone {
            job.gone();
        }
        let state = self.lock();
        self.settle(&state);
    }

    /// On or off, as it is now.
    fn settle(&self, state: &State<J, P>) {
        let is_on = state.pace.is_some() || state.is_carried || !state.waiting.is_empty();
        // Relaxed: it is written under the lock.
        let was_on = self.on.load(Ordering::Relaxed) != 0;
        if is_on == was_on {
            return;
        }
        if is_on {
            // Relaxed: who does not see it yet came before.
            self.on.store(1, Ordering::Relaxed);
            // Relaxed: as above.
            self.any.fetch_add(1, Ordering::Relaxed);
        } else {
            // Release: pairs with the Acquire in `is_on`: all who waited have gone on.
            self.on.store(0, Ordering::Release);
            // Release: pairs with the Acquire of who looks whether any is on, in the same way.
            self.any.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<J, P> Drop for Line<J, P> {
    fn drop(&mut self) {
        // Relaxed: nobody else has it any more.
        if self.on.load(Ordering::Relaxed) != 0 {
            // Release: as in `settle`.
            self.any.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<J, P: Pace> State<J, P> {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        match &mut self.pace {
            Some(pace) if self.lifted == 0 => pace.pay(owed),
            _ => Ok(()),
        }
    }

    /// The first one, where it has paid.
    fn first_pays(&mut self) -> Result<Option<J>, Duration> {
        let Some(mut owed) = self.waiting.front().map(|(_, owed)| *owed) else { return Ok(None) };
        let paid = self.pay(&mut owed);
        if let Some((_, left)) = self.waiting.front_mut() {
            *left = owed;
        }
        paid.map(|()| self.waiting.pop_front().map(|(job, _)| job))
    }
}
