//! A line with its rates, and who carries it on: one timer for the whole process, and one thread.

use std::io;
use std::time::Duration;

use super::line::{Cost, Entered, Line, Next, Waits};
use super::rate::{Limits, Rates, Since};
use crate::sync::{Arc, AtomicU32, Instant, LazyLock, Mutex};
use crate::timer;
use crate::work_queue::WorkQueue;

/// Requests that one line carries on before others have a turn.
const TURN: usize = 64;

/// The thread that carries on, for all lines. What waits submits requests, and waits for nothing.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::plugged("limits"));

/// Lets through so many a second.
///
/// Lock order: `limits`, held while rates are exchanged, before the line's.
pub struct Limiter<J> {
    line: Arc<Line<J, Rates>>,
    limits: Mutex<Limits>,
}

/// Nobody waits until this is dropped.
pub struct Lifted<J: Waits>(Arc<Line<J, Rates>>);

/// Who would have to wait is gone until this is dropped.
pub struct Ended<J: Waits>(Arc<Line<J, Rates>>);

impl<J: Waits> Limiter<J> {
    /// Without limits. `any` counts those that have one, of all that share it.
    pub fn new(any: Arc<AtomicU32>) -> Self {
        Self { line: Arc::new(Line::new(any)), limits: Mutex::default() }
    }

    /// Whether who comes may have to wait.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.line.is_on()
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Other limits from now on, also for those that wait. Where nobody does they begin with a whole
    /// burst.
    ///
    /// # Errors
    /// The threads could not be started; nothing has changed.
    pub fn set(&self, limits: &Limits) -> io::Result<()> {
        let mut known = self.limits.lock();
        if *known == *limits {
            return Ok(());
        }
        if *limits != Limits::default() {
            timer::start()?;
            WORK.start()?;
        }
        *known = *limits;
        let clock = Since::now();
        self.line.set(|anybody_waits| Rates::new(limits, &clock, anybody_waits));
        drop(known);
        push(Arc::clone(&self.line));
        Ok(())
    }

    /// Comes, and goes on: now, which is returned, or when its turn has come.
    #[must_use]
    pub fn enter(&self, job: J, cost: Cost) -> Option<J> {
        match self.line.enter(job, cost) {
            Entered::Goes(job) => return Some(job),
            Entered::Gone(job) => job.gone(),
            Entered::First(wait) => look_again(&self.line, wait),
            Entered::Waits => {}
        }
        None
    }

    /// Nobody waits until what is returned is dropped; those that do go on.
    #[must_use]
    pub fn lift(&self) -> Lifted<J> {
        self.line.lift();
        push(Arc::clone(&self.line));
        Lifted(Arc::clone(&self.line))
    }

    /// Those that wait are gone, and those that come and would have to pay, until what is returned is
    /// dropped.
    #[must_use]
    pub fn end(&self) -> Ended<J> {
        self.line.end();
        Ended(Arc::clone(&self.line))
    }

    /// Those of the waiting are gone that are so.
    pub fn end_those(&self, are_so: impl Fn(&J) -> bool) {
        self.line.end_those(are_so);
    }
}

impl<J: Waits> Drop for Lifted<J> {
    fn drop(&mut self) {
        self.0.lay();
    }
}

impl<J: Waits> Drop for Ended<J> {
    fn drop(&mut self) {
        self.0.begin();
    }
}

/// The thread carries on.
fn push<J: Waits>(line: Arc<Line<J, Rates>>) {
    // Where nothing ever had a limit there is no thread, and nobody who waits.
    if line.is_on() {
        WORK.push(move || carry_on(&line));
    }
}

fn carry_on<J: Waits>(line: &Arc<Line<J, Rates>>) {
    match line.carry_on(TURN) {
        Next::Nothing => {}
        Next::Again => push(Arc::clone(line)),
        Next::After(wait) => look_again(line, wait),
    }
}

fn look_again<J: Waits>(line: &Arc<Line<J, Rates>>, wait: Duration) {
    // A line that nobody has any more has told those that waited.
    let weak = Arc::downgrade(line);
    let action = move || {
        if let Some(line) = weak.upgrade() {
            push(line);
        }
    };
    // A rate says at most how long a whole burst takes, which no clock overflows; the timer runs since
    // there are limits.
    let when = Instant::now().checked_add(wait);
    if when.is_none_or(|when| timer::at(when, action).is_err()) {
        push(Arc::clone(line));
    }
}
