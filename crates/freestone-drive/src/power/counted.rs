//! Requests while a [countdown](super::countdown) runs.

use std::sync::Arc;

use super::countdown::{Held, Pass, Then};
use super::drain::PowerShared;
use freestone_core::device::{Buffer, Completion, Error, IoBuf, Request, Result, Tried};

/// Answers requests that waited with [`Gone`](Error::Gone).
pub fn refuse(held: Vec<Held>) {
    for (_, buffer, done) in held {
        done.complete(Err(Error::Gone), buffer);
    }
}

impl PowerShared {
    /// Answers what waits for the power to be cut, and what comes until
    /// [`stop_counting`](Self::stop_counting).
    pub fn let_go(&self) {
        refuse(self.countdown.let_go());
    }

    /// Nothing is counted any more. What waits goes on.
    pub fn stop_counting(self: &Arc<Self>) {
        self.go_on(self.countdown.stop());
    }

    #[cold]
    pub fn try_counted(self: &Arc<Self>, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        match self.countdown.enter(request.op) {
            Pass::Free => self.try_io(request, buffer),
            Pass::Wait => Ok(Tried::WouldBlock),
            Pass::Gone => Err(Error::Gone),
            Pass::Counted(round) => {
                let outcome = self.try_io(request, buffer);
                let left = self.countdown.leave(round, outcome == Ok(Tried::Done));
                self.counted(left);
                outcome
            }
        }
    }

    #[cold]
    pub fn submit_counted(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let mut parts = Some((request, buffer, done));
        let pass = self.countdown.enter_or_hold(&mut parts);
        let Some((request, buffer, done)) = parts else { return };
        match pass {
            Pass::Gone | Pass::Wait => done.complete(Err(Error::Gone), buffer),
            Pass::Free => self.submit(request, buffer, done),
            Pass::Counted(round) => {
                let shared = Arc::clone(self);
                let done = Completion::new(move |outcome, buffer| {
                    // Who has the answer finds it counted; the power goes off behind it.
                    let left = shared.countdown.leave(round, outcome.is_ok());
                    done.complete(outcome, buffer);
                    shared.counted(left);
                });
                self.submit(request, buffer, done);
            }
        }
    }

    /// What follows when a request that took a number has left.
    fn counted(self: &Arc<Self>, (then, held): (Option<Then>, Vec<Held>)) {
        if let Some(then) = then {
            then();
        }
        self.go_on(held);
    }

    fn go_on(self: &Arc<Self>, held: Vec<Held>) {
        for (request, buffer, done) in held {
            self.submit_counted(request, buffer, done);
        }
    }
}
