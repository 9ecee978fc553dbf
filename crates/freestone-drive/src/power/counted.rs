//! Request path while a [countdown](super::countdown) to a power cut runs.

use std::sync::Arc;

use super::countdown::{Admission, HeldRequest, PowerOffAction};
use super::drain::PowerShared;
use freestone_core::device::{Buffer, Completion, Error, IoBuf, Request, Result, TryResult};

/// Fails held requests with [`Gone`](Error::Gone).
pub fn fail_held(held: Vec<HeldRequest>) {
    for (_, buffer, done) in held {
        done.complete(Err(Error::Gone), buffer);
    }
}

impl PowerShared {
    /// Fails the requests held by the countdown, and new requests until
    /// [`stop_counting`](Self::stop_counting) is called.
    pub fn fail_held_requests(&self) {
        fail_held(self.countdown.start_failing());
    }

    /// Cancels the countdown, and resubmits the requests that it held.
    pub fn stop_counting(self: &Arc<Self>) {
        self.resubmit(self.countdown.stop());
    }

    #[cold]
    pub fn try_counted(self: &Arc<Self>, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        match self.countdown.enter(request.op) {
            Admission::Free => self.try_io(request, buffer),
            Admission::Wait => Ok(TryResult::WouldBlock),
            Admission::Gone => Err(Error::Gone),
            Admission::Counted(round) => {
                let outcome = self.try_io(request, buffer);
                let left = self.countdown.finish(round, outcome == Ok(TryResult::Done));
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
                    // The request is counted before its completion runs, and the power goes off
                    // only afterwards.
                    let left = shared.countdown.finish(round, outcome.is_ok());
                    done.complete(outcome, buffer);
                    shared.finish_counted(left);
                });
                self.submit(request, buffer, done);
            }
        }
    }

    /// Runs the action if the countdown has ended, and resubmits requests that the countdown no
    /// longer holds.
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
