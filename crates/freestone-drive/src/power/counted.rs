//! Requests during a [countdown](super::countdown).

use std::sync::Arc;

use super::countdown::{Admission, HeldRequest, PowerOffAction};
use super::drain::PowerShared;
use freestone_core::device::{Buffer, Completion, Error, IoBuf, Request, Result, Tried};

/// Fails held requests with [`Gone`](Error::Gone).
pub fn fail_held(held: Vec<HeldRequest>) {
    for (_, buffer, done) in held {
        done.complete(Err(Error::Gone), buffer);
    }
}

impl PowerShared {
    /// Fails the requests held by the countdown, and new ones until
    /// [`stop_counting`](Self::stop_counting).
    pub fn let_go(&self) {
        fail_held(self.countdown.let_go());
    }

    /// Cancels the countdown. Held requests continue.
    pub fn stop_counting(self: &Arc<Self>) {
        self.resubmit(self.countdown.stop());
    }

    #[cold]
    pub fn try_counted(self: &Arc<Self>, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        match self.countdown.enter(request.op) {
            Admission::Free => self.try_io(request, buffer),
            Admission::Wait => Ok(Tried::WouldBlock),
            Admission::Gone => Err(Error::Gone),
            Admission::Counted(round) => {
                let outcome = self.try_io(request, buffer);
                let left = self.countdown.finish(round, outcome == Ok(Tried::Done));
                self.finish_counted(left);
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
            Admission::Gone | Admission::Wait => done.complete(Err(Error::Gone), buffer),
            Admission::Free => self.submit(request, buffer, done),
            Admission::Counted(round) => {
                let shared = Arc::clone(self);
                let done = Completion::new(move |outcome, buffer| {
                    // The completion sees the request counted; the power goes off after it.
                    let left = shared.countdown.finish(round, outcome.is_ok());
                    done.complete(outcome, buffer);
                    shared.finish_counted(left);
                });
                self.submit(request, buffer, done);
            }
        }
    }

    /// Runs the action of an elapsed countdown, and resubmits requests that may continue.
    fn finish_counted(self: &Arc<Self>, (then, held): (Option<PowerOffAction>, Vec<HeldRequest>)) {
        if let Some(then) = then {
            then();
        }
        self.resubmit(held);
    }

    fn resubmit(self: &Arc<Self>, held: Vec<HeldRequest>) {
        for (request, buffer, done) in held {
            self.submit_counted(request, buffer, done);
        }
    }
}
