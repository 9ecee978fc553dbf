//! Answers that are held back: until a moment (delay), or until somebody lets go of them (hang).
//!
//! Lock order: `held` is innermost. Answers are given outside of it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use freestone_core::device::{Error, Result};
use freestone_core::sync::{Condvar, Instant, Mutex};
use freestone_core::timer;

/// How long an answer is held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pause {
    #[default]
    No,
    /// It is given no earlier.
    Until(Instant),
    /// It is given when it is let go.
    Hang,
}

impl Pause {
    /// The longer one.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Hang, _) | (_, Self::Hang) => Self::Hang,
            (Self::Until(a), Self::Until(b)) => Self::Until(a.max(b)),
            (Self::No, pause) | (pause, Self::No) => pause,
        }
    }

    /// A delay from now on.
    pub fn of(delay: Duration) -> Self {
        // A moment that the clock cannot name does not come.
        Instant::now().checked_add(delay).map_or(Self::Hang, Self::Until)
    }
}

/// Gives the answer: as it is, or [`Error::Gone`] in its place.
type Give = Box<dyn FnOnce(Result<()>) + Send>;

/// The answers that one device holds back.
#[derive(Default)]
pub struct Hold {
    held: Mutex<Held>,
    /// Threads wait here that a zone operation blocks.
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    answers: BTreeMap<u64, Answer>,
    next: u64,
    /// Threads that hang.
    threads: u64,
    /// How often hanging requests were let go.
    releases: u64,
    closed: bool,
}

struct Answer {
    hangs: bool,
    give: Give,
}

impl Hold {
    /// Has the answer given when its time has come, with `Ok`; with [`Error::Gone`] where the
    /// device ends before.
    pub fn give(self: &Arc<Self>, pause: Pause, give: impl FnOnce(Result<()>) + Send + 'static) {
        let when = match pause {
            Pause::Hang => None,
            Pause::Until(when) if when > Instant::now() => Some(when),
            Pause::No | Pause::Until(_) => return give(Ok(())),
        };
        let id;
        {
            let mut held = self.held.lock();
            if held.closed {
                drop(held);
                return give(Err(Error::Gone));
            }
            id = held.next;
            held.next += 1;
            held.answers.insert(id, Answer { hangs: when.is_none(), give: Box::new(give) });
        }
        if let Some(when) = when {
            let hold = Arc::downgrade(self);
            let due = timer::at(when, move || {
                if let Some(hold) = hold.upgrade() {
                    hold.due(id);
                }
            });
            if due.is_err() {
                // Cannot be: the timer runs since the device was made. Early is better than never.
                self.due(id);
            }
        }
    }

    fn due(&self, id: u64) {
        let answer = self.held.lock().answers.remove(&id);
        if let Some(answer) = answer {
            (answer.give)(Ok(()));
        }
    }

    /// Blocks the calling thread for the pause.
    pub fn wait(&self, pause: Pause) -> Result<()> {
        if pause == Pause::No {
            return Ok(());
        }
        let mut held = self.held.lock();
        let releases = held.releases;
        if pause == Pause::Hang {
            held.threads += 1;
        }
        let outcome = loop {
            if held.closed {
                break Err(Error::Gone);
            }
            held = match pause {
                Pause::Until(when) => match when.checked_duration_since(Instant::now()) {
                    None | Some(Duration::ZERO) => break Ok(()),
                    Some(left) => {
                        self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                },
                _ if held.releases > releases => break Ok(()),
                _ => freestone_core::pin::wait(&self.changed, held),
            };
        };
        if pause == Pause::Hang {
            held.threads -= 1;
        }
        outcome
    }

    /// Lets go of what hangs; how much it was.
    pub fn release(&self) -> u64 {
        let (released, threads) = {
            let mut held = self.held.lock();
            held.releases += 1;
            let all = std::mem::take(&mut held.answers);
            let (released, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
                all.into_iter().partition(|(_, answer)| answer.hangs);
            held.answers = kept;
            (released, held.threads)
        };
        self.changed.notify_all();
        let count = released.len() as u64 + threads;
        for answer in released.into_values() {
            (answer.give)(Ok(()));
        }
        count
    }

    /// How much hangs.
    pub fn hanging(&self) -> u64 {
        let held = self.held.lock();
        held.answers.values().filter(|answer| answer.hangs).count() as u64 + held.threads
    }

    /// Answers everything with [`Error::Gone`], and what comes later too.
    pub fn close(&self) {
        let all = {
            let mut held = self.held.lock();
            held.closed = true;
            std::mem::take(&mut held.answers)
        };
        self.changed.notify_all();
        for answer in all.into_values() {
            (answer.give)(Err(Error::Gone));
        }
    }
}
