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
            spawn(scope, worker, move || work(worker))?;
        }
        let mut send = |state, tag| !is_over.load(SeqCst) && sender.send((state, tag)).is_ok();
        let produced = produce(&mut send);
        drop(sender);
        produced
    });
    error.into_inner().map_or(produced, Err)
}

/// Checks the states of `next` on `jobs` threads, in order, until one fails. Returns the outcomes with the
/// identities of the states.
///
/// `next` is called by one thread at a time. A state that was taken from it is checked to the end. So all
/// states before the first failing one have an outcome, and a few after it may have one, unless the watch
/// or a check stopped.
pub fn check_until_failure(
    check: &dyn Check,
    jobs: NonZeroUsize,
    watch: &dyn Watch,
    next: impl FnMut() -> Option<State> + Send,
) -> Result<Vec<(u128, Outcome)>> {
    let next = Mutex::new(next);
    let outcomes = Mutex::new(Vec::new());
    let error = Mutex::new(None);
    let is_over = AtomicBool::new(false);
    let work = |worker: usize| {
        loop {
            let state = {
                let mut next = next.lock();
                if is_over.load(SeqCst) || watch.should_stop() {
                    return;
                }
                let Some(state) = next() else { return };
                state
            };
            let is_last = match check_twice(check, worker, &state) {
                Ok(Some(outcome)) => {
                    let fails = !outcome.verdict.passed && !outcome.is_flaky;
                    outcomes.lock().push((state.identity(), outcome));
                    fails
                }
                Ok(None) => true,
                Err(why) => {
                    error.lock().get_or_insert(why);
                    true
                }
            };
            is_over.fetch_or(is_last, SeqCst);
        }
    };
    let work = &work;
    let started = thread::scope(|scope| {
        let spawned = (0..jobs.get()).try_for_each(|worker| spawn(scope, worker, move || work(worker)));
        // Without all threads, those that were started end early.
        spawned.inspect_err(|_| is_over.store(true, SeqCst))
    });
    error.into_inner().map_or(started, Err)?;
    Ok(outcomes.into_inner())
}

fn spawn<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    worker: usize,
    work: impl FnOnce() + Send + 'scope,
) -> Result<()> {
    let thread = thread::Builder::new().name(format!("explore-{worker}"));
    thread.spawn_scoped(scope, work).map(drop).map_err(ExploreError::Thread)
}
