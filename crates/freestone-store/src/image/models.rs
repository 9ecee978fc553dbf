//! loom models of the fetch queue and the queue of the readers. Each object is fetched once for all its
//! waiters, each waiter runs once, and no thread sleeps while there is work.

use freestone_core::device;
use freestone_core::sync::{Condvar, Mutex};

use super::fetches::{FetchError, Fetches, Source, Waiter};
use super::queue::Queue;
use crate::rt::sync::Arc;
use crate::rt::thread;
use crate::rt::time::Duration;

type Outcome = Result<u8, device::Error>;

/// Shared state of a model, with a condition variable that signals changes.
struct Counts<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> Counts<T> {
    fn new(state: T) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let changed = change(&mut self.state.lock());
        self.changed.notify_all();
        changed
    }

    fn wait(&self, until: impl Fn(&T) -> bool) {
        let mut state = self.state.lock();
        while !until(&state) {
            state = self.changed.wait(state);
        }
    }
}

/// Events of a model run.
#[derive(Default)]
struct History {
    /// Number of demand fetches that the model has queued.
    demanded: usize,
    /// Results that each waiter received, by the number of the waiter.
    results: [Vec<Outcome>; 3],
    /// Number of fetches of each key.
    fetched: [usize; 3],
    /// True for each key that is being fetched.
    running: [bool; 3],
}

impl History {
    fn result_count(&self) -> usize {
        self.results.iter().map(Vec::len).sum()
    }
}

/// Simulated object store. Each model has its own function for the responses.
struct Store {
    history: Arc<Counts<History>>,
    respond: fn(&Counts<History>, u8) -> Result<u8, FetchError>,
}

impl Source for Store {
    type Key = u8;
    type Value = u8;

    fn fetch(&self, key: u8, _: bool, _: &mut Vec<u8>) -> Result<u8, FetchError> {
        let at = usize::from(key);
        self.history.change(|history| {
            history.fetched[at] += 1;
            assert!(!std::mem::replace(&mut history.running[at], true), "the key is already being fetched");
        });
        let response = (self.respond)(&self.history, key);
        self.history.change(|history| history.running[at] = false);
        response
    }

    fn timeout(&self) -> Duration {
        // With a timeout of zero, every waiter has waited for longer than the timeout.
        Duration::ZERO
    }
}

/// Waiter that records its results under its number. Needs a second object if that has a key.
struct NumberedWaiter {
    history: Arc<Counts<History>>,
    number: usize,
    then: Option<u8>,
}

impl Waiter<Store> for NumberedWaiter {
    fn deliver(self, got: u8) {
        self.history.change(|history| history.results[self.number].push(Ok(got)));
    }

    fn resume(mut self, got: u8) -> Option<(u8, Self)> {
        self.history.change(|history| history.results[self.number].push(Ok(got)));
        self.then.take().map(|key| (key, self))
    }

    fn deliver_error(self, error: device::Error) {
        self.history.change(|history| history.results[self.number].push(Err(error)));
    }
}

struct Model {
    fetches: Arc<Fetches<Store, NumberedWaiter>>,
    history: Arc<Counts<History>>,
}

impl Model {
    fn new(respond: fn(&Counts<History>, u8) -> Result<u8, FetchError>) -> Self {
        let history = Counts::new(History::default());
        let source = Arc::new(Store { history: Arc::clone(&history), respond });
        Self { fetches: Arc::new(Fetches::new(source)), history }
    }

    fn demand(&self, key: u8, waiter: usize) {
        self.demand_both(key, None, waiter);
    }

    /// Demands an object, and another one when that is fetched.
    fn demand_both(&self, key: u8, then: Option<u8>, number: usize) {
        self.fetches.demand(key, NumberedWaiter { history: Arc::clone(&self.history), number, then });
        self.history.change(|history| history.demanded += 1);
    }

    /// Runs `act` on another thread, with the same queue and history.
    fn spawn_thread(&self, act: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let other = Self { fetches: Arc::clone(&self.fetches), history: Arc::clone(&self.history) };
        thread::spawn(move || act(&other))
    }

    /// Waits for `count` results of all waiters, and checks that there are no more. Returns the results of
    /// each waiter.
    fn results(&self, count: usize) -> [Vec<Outcome>; 3] {
        self.history.wait(|history| history.result_count() >= count);
        self.fetches.close();
        self.history.change(|history| {
            assert_eq!(history.result_count(), count, "a waiter ran more than once");
            history.results.clone()
        })
    }
}

/// Checks all interleavings with a limited number of preemptions. More preemptions would take minutes.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn respond(_: &Counts<History>, key: u8) -> Result<u8, FetchError> {
    Ok(key + 10)
}

#[test]
fn fetch_runs_once_for_two_waiters() {
    bounded(2, || {
        // The fetch ends when both waiters are queued.
        let model = Model::new(|history, key| {
            history.wait(|history| history.demanded == 2);
            respond(history, key)
        });
        let other = model.spawn_thread(|model| model.demand(1, 1));
        model.demand(1, 0);
        let results = model.results(2);
        assert_eq!(results, [vec![Ok(11)], vec![Ok(11)], Vec::new()]);
        model.history.wait(|history| history.fetched == [0, 1, 0]);
        other.join().unwrap();
    });
}

#[test]
fn demand_during_fetch_gets_result() {
    bounded(2, || {
        let model = Model::new(respond);
        let other = model.spawn_thread(|model| model.demand(1, 1));
        model.demand(1, 0);
        assert_eq!(model.results(2), [vec![Ok(11)], vec![Ok(11)], Vec::new()]);
        other.join().unwrap();
    });
}

#[test]
fn second_object_of_waiter_is_fetched_once() {
    bounded(2, || {
        let model = Model::new(respond);
        let other = model.spawn_thread(|model| model.demand(2, 1));
        model.demand_both(1, Some(2), 0);
        assert_eq!(model.results(3), [vec![Ok(11), Ok(12)], vec![Ok(12)], Vec::new()]);
        other.join().unwrap();
    });
}

#[test]
fn demand_during_close_gets_one_result() {
    bounded(2, || {
        let model = Model::new(respond);
        let closes = model.spawn_thread(|model| model.fetches.close());
        model.demand(1, 0);
        model.demand(2, 1);
        closes.join().unwrap();
        for (results, value) in model.results(2).iter().zip([11, 12]) {
            assert!(
                matches!(results[..], [result] if result == Ok(value) || result == Err(device::Error::Gone))
            );
        }
    });
}

#[test]
fn demand_does_not_wait_for_prefetches() {
    bounded(2, || {
        // Prefetches end only after the demand fetch.
        let model = Model::new(|history, key| {
            if key != 0 {
                history.wait(|history| history.result_count() > 0);
            }
            respond(history, key)
        });
        model.fetches.prefetch([1, 2]);
        model.demand(0, 0);
        assert_eq!(model.results(1)[0], [Ok(10)]);
    });
}

#[test]
fn demand_of_queued_prefetch_fetches_once() {
    bounded(2, || {
        let model = Model::new(|history, key| {
            history.wait(|history| history.demanded == 1);
            respond(history, key)
        });
        model.fetches.prefetch([1]);
        model.demand(1, 0);
        assert_eq!(model.results(1)[0], [Ok(11)]);
        model.history.wait(|history| history.fetched == [0, 1, 0]);
    });
}

#[test]
#[ignore = "slow lane"]
fn demand_during_thread_exit_gets_result() {
    bounded(2, || {
        let model = Model::new(respond);
        model.demand(1, 0);
        let time = model.spawn_thread(|model| model.fetches.expire_waits());
        model.demand(2, 1);
        assert_eq!(model.results(2), [vec![Ok(11)], vec![Ok(12)], Vec::new()]);
        time.join().unwrap();
    });
}

#[test]
#[ignore = "slow lane"]
fn hanging_store_fails_each_waiter_once() {
    bounded(2, || {
        let model = Model::new(|_, _| Err(FetchError { error: device::Error::Media, is_hanging: true }));
        let other = model.spawn_thread(|model| model.demand(2, 2));
        model.demand(1, 0);
        model.demand(2, 1);
        let failed = || vec![Err(device::Error::Media)];
        assert_eq!(model.results(3), [failed(), failed(), failed()]);
        other.join().unwrap();
    });
}

// ---- the readers' queue -------------------------------------------------------------------------

type Done = Arc<Counts<usize>>;

fn queue() -> Queue<Done> {
    Queue::new("model", 2, |done: Done| done.change(|done| *done += 1))
}

#[test]
fn queue_runs_concurrent_pushes_once() {
    bounded(2, || {
        let (queue, done) = (Arc::new(queue()), Counts::new(0));
        let (of_other, count) = (Arc::clone(&queue), Arc::clone(&done));
        let other = thread::spawn(move || of_other.push(count).is_ok());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        done.wait(|done| *done == 2);
        assert!(other.join().unwrap());
    });
}

#[test]
fn queue_runs_push_during_thread_exit() {
    bounded(2, || {
        let (queue, done) = (Arc::new(queue()), Counts::new(0));
        assert!(queue.push(Arc::clone(&done)).is_ok());
        let of_other = Arc::clone(&queue);
        let time = thread::spawn(move || of_other.expire_waits());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        done.wait(|done| *done == 2);
        time.join().unwrap();
    });
}

#[test]
fn dropped_queue_finishes_its_work() {
    bounded(2, || {
        let (queue, done) = (queue(), Counts::new(0));
        assert!(queue.push(Arc::clone(&done)).is_ok());
        assert!(queue.push(Arc::clone(&done)).is_ok());
        drop(queue);
        done.wait(|done| *done == 2);
    });
}
