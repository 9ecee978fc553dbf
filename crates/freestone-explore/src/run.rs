//! Runs checks on states, in parallel, and collects the verdicts.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;

use freestone_core::device::Device;
use freestone_core::sync::Mutex;

use crate::report::{Progress, Verdict};
use crate::state::State;
use crate::{ExploreError, Result};

/// The user's check of a state.
pub trait Check: Sync {
    /// Checks a state, whose content is on `disk`. Each worker, from 0, runs one check at a time.
    /// Returns `None` if the check was stopped before it ended.
    ///
    /// # Errors
    /// [`ExploreError::Check`] if the check cannot be run, which ends the exploration.
    fn check(&self, worker: usize, state: &State, disk: Arc<dyn Device>) -> Result<Option<Verdict>>;
}

/// Observer of an exploration.
pub trait Watch: Sync {
    /// Returns true if the exploration must end. The exploration waits for running checks.
    fn should_stop(&self) -> bool;

    /// Reports progress.
    fn report(&self, progress: &Progress);
}

/// Outcome of a check and, if it failed, of its repetition.
pub struct Outcome {
    pub verdict: Verdict,
    /// True if the repetition passed.
    pub is_flaky: bool,
}

/// Makes the disk of a state and checks it. A failed check is repeated once. Returns `None` if a check
/// was stopped.
pub fn check_twice(check: &dyn Check, worker: usize, state: &State) -> Result<Option<Outcome>> {
    let run = || check.check(worker, state, Arc::new(state.disk()?));
    let Some(verdict) = run()? else { return Ok(None) };
    if verdict.passed {
        return Ok(Some(Outcome { verdict, is_flaky: false }));
    }
    Ok(run()?.map(|again| Outcome { verdict, is_flaky: again.passed }))
}

/// Checks the states of `produce` on `jobs` threads, and passes each outcome to `collect` on one of
/// these threads, one at a time.
///
/// `produce` sends states with the function that it receives. The function waits while all threads
/// are busy, and returns false if no more states are accepted: `collect` returned false, or a check
/// was stopped or failed to run.
pub fn run_checks<T: Send>(
    check: &dyn Check,
    jobs: NonZeroUsize,
    produce: impl FnOnce(&mut dyn FnMut(State, T) -> bool) -> Result<()>,
    collect: impl FnMut(&State, T, Outcome) -> bool + Send,
) -> Result<()> {
    let (sender, receiver) = mpsc::sync_channel::<(State, T)>(jobs.get());
    let receiver = Mutex::new(receiver);
    let collect = Mutex::new(collect);
    let error = Mutex::new(None);
    let is_over = AtomicBool::new(false);
    let work = |worker: usize| {
        loop {
            // The lock is held while waiting: the other idle threads wait for it instead.
            let next = receiver.lock().recv();
            let Ok((state, tag)) = next else { return };
            if is_over.load(SeqCst) {
                // Received states are dropped, so that the producer does not wait.
                continue;
            }
            let more = match check_twice(check, worker, &state) {
                Ok(Some(outcome)) => (collect.lock())(&state, tag, outcome),
                Ok(None) => false,
                Err(why) => {
                    error.lock().get_or_insert(why);
                    false
                }
            };
            if !more {
                is_over.store(true, SeqCst);
            }
        }
    };
    let work = &work;
    let produced = thread::scope(|scope| {
        for worker in 0..jobs.get() {
            let thread = thread::Builder::new().name(format!("explore-{worker}"));
            thread.spawn_scoped(scope, move || work(worker)).map_err(ExploreError::Thread)?;
        }
        let mut send = |state, tag| !is_over.load(SeqCst) && sender.send((state, tag)).is_ok();
        let produced = produce(&mut send);
        drop(sender);
        produced
    });
    error.into_inner().map_or(produced, Err)
}
