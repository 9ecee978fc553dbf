//! Fetch threads. Each object is fetched once for all its waiters. Demand fetches have priority over
//! prefetches.
//!
//! A thread is spawned if there is a fetch that no idle thread can start, up to a limit. Threads exit after a
//! while without work, and when the queue is closed. There is one lock, which is held only for a few
//! instructions, never during a fetch or while a waiter runs.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device;
use freestone_core::sync::{Mutex, MutexGuard};

use crate::rt::Condvar;
use crate::rt::sync::Arc;
use crate::rt::thread;
use crate::rt::time::{Duration, Instant};

/// Maximum number of concurrent fetches.
const THREADS: usize = if cfg!(loom) { 2 } else { 32 };
/// Maximum number of concurrent prefetches.
const AHEAD_AT_ONCE: usize = if cfg!(loom) { 1 } else { 16 };
/// Maximum number of queued prefetches.
pub const AHEAD_MAX: usize = 1 << 16;
/// Time after which an idle thread exits.
const IDLE: Duration = Duration::from_secs(10);

/// Source from which the threads fetch objects.
pub trait Source: Send + Sync + 'static {
    /// Key that identifies an object to fetch.
    type Key: Copy + Ord + Send;
    /// Result of a successful fetch.
    type Value: Clone;

    /// Fetches one object. `is_wanted` is true for a demand fetch. The source adds the keys of objects to
    /// prefetch to `ahead`.
    ///
    /// # Errors
    /// The error that the waiters for the object receive.
    fn fetch(
        &self,
        key: Self::Key,
        is_wanted: bool,
        ahead: &mut Vec<Self::Key>,
    ) -> Result<Self::Value, FetchError>;

    /// Returns the timeout of one fetch.
    fn timeout(&self) -> Duration;
}

/// Failure of a fetch.
pub struct FetchError {
    /// Error that the waiters for the object receive.
    pub error: device::Error,
    /// The store timed out or was busy, so it may hang. Waiters of queued fetches that have already waited
    /// for a timeout then fail too, rather than wait for another timeout.
    pub is_hanging: bool,
}

/// Waiter for a fetch, which receives either the result or an error, once.
pub trait Waiter<S: Source>: Send + Sized + 'static {
    /// Receives the result of the fetch, and continues on another thread.
    fn deliver(self, got: S::Value);
    /// Receives the result of the fetch, and continues on the fetch thread. Returns itself with the key of the next
    /// object that it needs, if any.
    fn resume(self, got: S::Value) -> Option<(S::Key, Self)>;
    /// Receives the error of the fetch, which is not retried.
    fn deliver_error(self, error: device::Error);
}

/// Queue of fetches and their waiters.
pub struct Fetches<S: Source, W>(Arc<Inner<S, W>>);

struct Inner<S: Source, W> {
    source: Arc<S>,
    state: Mutex<State<S::Key, W>>,
    more: Condvar,
}

struct State<K, W> {
    wanted: BTreeMap<K, PendingFetch<W>>,
    demand: VecDeque<K>,
    ahead: VecDeque<K>,
    threads: usize,
    idle: usize,
    /// Number of threads that run a prefetch.
    ahead_running: usize,
    is_closed: bool,
}

struct PendingFetch<W> {
    since: Instant,
    is_started: bool,
    waiters: Vec<W>,
}

impl<W> PendingFetch<W> {
    fn new() -> Self {
        Self { since: Instant::now(), is_started: false, waiters: Vec::new() }
    }
}

impl<S: Source, W: Waiter<S>> Fetches<S, W> {
    pub fn new(source: Arc<S>) -> Self {
        let state = State {
            wanted: BTreeMap::new(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            threads: 0,
            idle: 0,
            ahead_running: 0,
            is_closed: false,
        };
        Self(Arc::new(Inner { source, state: Mutex::new(state), more: Condvar::new() }))
    }

    /// Closes the queue: fails all waiters with `Gone`, and starts no further fetch.
    pub fn close(&self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        (state.demand, state.ahead) = Default::default();
        let wanted = std::mem::take(&mut state.wanted);
        drop(state);
        self.0.more.notify_all();
        for waiter in wanted.into_values().flat_map(|wanted| wanted.waiters) {
            waiter.deliver_error(device::Error::Gone);
        }
    }

    /// Queues a demand fetch, unless a fetch of the object is already queued or running. The waiter runs when
    /// the fetch ends.
    pub fn demand(&self, key: S::Key, waiter: W) {
        freestone_core::trail::step!();
        let Some((mut state, is_first)) = self.0.add_waiter(key, waiter) else { return };
        if is_first {
            state.demand.push_back(key);
            self.wake_or_spawn_thread(&mut state);
        }
        let has_no_thread = state.threads == 0;
        drop(state);
        if has_no_thread {
            self.0.fail_queued(&|_| true, device::Error::NoMemory);
        }
    }

    /// Queues prefetches. Drops keys that are already queued or being fetched, and keys beyond [`AHEAD_MAX`].
    pub fn prefetch(&self, keys: impl IntoIterator<Item = S::Key>) {
        let mut state = self.0.state.lock();
        for key in keys {
            if state.is_closed || state.ahead.len() >= AHEAD_MAX || state.wanted.contains_key(&key) {
                continue;
            }
            state.wanted.insert(key, PendingFetch::new());
            state.ahead.push_back(key);
            self.wake_or_spawn_thread(&mut state);
        }
    }

    fn wake_or_spawn_thread(&self, state: &mut State<S::Key, W>) {
        // Each idle thread can start one fetch. Prefetches above AHEAD_AT_ONCE are not counted: otherwise the
        // idle threads would seem too few, all threads would be spawned for them, and none would be woken for
        // a later demand.
        let may_begin = state.ahead.len().min(AHEAD_AT_ONCE - state.ahead_running);
        if state.idle >= state.demand.len() + may_begin {
            self.0.more.notify_one();
        } else if state.threads < THREADS {
            let of_thread = Self(Arc::clone(&self.0));
            let made =
                thread::Builder::new().name("image-fetch".into()).spawn(move || of_thread.run_thread());
            state.threads += usize::from(made.is_ok());
        }
    }

    /// Runs fetches until [`wait_for_key`](Inner::wait_for_key) ends this thread. The last waiter of a fetch continues
    /// on this thread, which then also fetches the next object that this waiter needs.
    fn run_thread(&self) {
        let mut next = None;
        while let Some((key, is_demand)) = next.take().or_else(|| self.0.wait_for_key()) {
            freestone_core::trail::arrive!();
            let mut ahead = Vec::new();
            // A panic in code that parses data from the object store must not lose waiters or end the thread.
            let fetch = AssertUnwindSafe(|| self.0.source.fetch(key, is_demand, &mut ahead));
            let outcome = catch_unwind(fetch)
                .unwrap_or(Err(FetchError { error: device::Error::Media, is_hanging: false }));
            self.prefetch(ahead);
            let mut state = self.0.state.lock();
            state.ahead_running -= usize::from(!is_demand);
            let mut waiters = state.wanted.remove(&key).map_or(Vec::new(), |wanted| wanted.waiters);
            drop(state);
            match outcome {
                Ok(got) => {
                    let last = waiters.pop();
                    for waiter in waiters {
                        waiter.deliver(got.clone());
                    }
                    let resume = AssertUnwindSafe(|| last.and_then(|last| last.resume(got)));
                    let needs = catch_unwind(resume).ok().flatten();
                    next = needs.and_then(|(key, waiter)| self.0.start_fetch(key, waiter));
                }
                Err(FetchError { error, is_hanging }) => {
                    for waiter in waiters {
                        waiter.deliver_error(error);
                    }
                    if is_hanging {
                        let timeout = self.0.source.timeout();
                        self.0.fail_queued(&|wanted| wanted.since.elapsed() >= timeout, error);
                    }
                }
            }
        }
    }

    /// Makes the waits of idle threads time out, for loom models.
    #[cfg(all(loom, test))]
    pub fn expire_waits(&self) {
        self.0.more.expire_waits();
    }
}

type StateGuard<'a, K, W> = MutexGuard<'a, State<K, W>>;

impl<S: Source, W: Waiter<S>> Inner<S, W> {
    /// Adds a waiter for an object. Returns the state, and true if a fetch of the object must be queued or started.
    /// Fails the waiter and returns `None` if the queue is closed.
    fn add_waiter(&self, key: S::Key, waiter: W) -> Option<(StateGuard<'_, S::Key, W>, bool)> {
        let mut state = self.state.lock();
        if state.is_closed {
            drop(state);
            waiter.deliver_error(device::Error::Gone);
            return None;
        }
        // The key may also be in the prefetch queue. The prefetch entry is skipped later, as its fetch has then
        // started.
        let wanted = state.wanted.entry(key).or_insert_with(PendingFetch::new);
        let is_first = wanted.waiters.is_empty() && !wanted.is_started;
        wanted.waiters.push(waiter);
        Some((state, is_first))
    }

    /// Adds a waiter for an object. Returns the key, as a demand fetch, if the calling thread must fetch the object.
    fn start_fetch(&self, key: S::Key, waiter: W) -> Option<(S::Key, bool)> {
        let (mut state, is_first) = self.add_waiter(key, waiter)?;
        let wanted = state.wanted.get_mut(&key).filter(|_| is_first)?;
        wanted.is_started = true;
        Some((key, true))
    }

    fn fail_queued(&self, which: &dyn Fn(&PendingFetch<W>) -> bool, error: device::Error) {
        let mut state = self.state.lock();
        let keys: Vec<S::Key> = state
            .wanted
            .iter()
            .filter(|(_, wanted)| !wanted.is_started && which(wanted))
            .map(|(key, _)| *key)
            .collect();
        let failed: Vec<PendingFetch<W>> = keys.iter().filter_map(|key| state.wanted.remove(key)).collect();
        drop(state);
        for waiter in failed.into_iter().flat_map(|wanted| wanted.waiters) {
            waiter.deliver_error(error);
        }
    }
}

impl<K: Copy + Ord, W> State<K, W> {
    /// Returns the next key to fetch, and true for a demand fetch or false for a prefetch. Returns `None` if
    /// no fetch may start.
    fn next(&mut self) -> Option<(K, bool)> {
        while let Some(key) = self.demand.pop_front() {
            if let Some(wanted) = self.wanted.get_mut(&key).filter(|wanted| !wanted.is_started) {
                wanted.is_started = true;
                return Some((key, true));
            }
        }
        while self.ahead_running < AHEAD_AT_ONCE
            && let Some(key) = self.ahead.pop_front()
        {
            if let Some(wanted) = self.wanted.get_mut(&key).filter(|wanted| !wanted.is_started) {
                wanted.is_started = true;
                self.ahead_running += 1;
                return Some((key, false));
            }
        }
        None
    }
}

impl<S: Source, W: Waiter<S>> Inner<S, W> {
    /// Waits for the next key to fetch, and returns it with true for a demand fetch. Returns `None` if the
    /// thread must exit.
    fn wait_for_key(&self) -> Option<(S::Key, bool)> {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = state.next() {
                return Some(next);
            }
            if state.is_closed {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let timed_out;
            (state, timed_out) = self.more.wait_timeout(state, IDLE);
            state.idle -= 1;
            if timed_out && state.demand.is_empty() && state.ahead.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }
}

const _: () = assert!(AHEAD_AT_ONCE < THREADS);

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct PanickingSource;

    impl Source for PanickingSource {
        type Key = u8;
        type Value = u8;

        fn fetch(&self, key: u8, _: bool, _: &mut Vec<u8>) -> Result<u8, FetchError> {
            assert_ne!(key, 0, "on purpose");
            Ok(key)
        }

        fn timeout(&self) -> Duration {
            Duration::from_secs(60)
        }
    }

    impl Waiter<PanickingSource> for mpsc::Sender<Result<u8, device::Error>> {
        fn deliver(self, got: u8) {
            self.send(Ok(got)).unwrap();
        }

        fn resume(self, got: u8) -> Option<(u8, Self)> {
            self.deliver(got);
            None
        }

        fn deliver_error(self, error: device::Error) {
            self.send(Err(error)).unwrap();
        }
    }

    #[test]
    fn fetch_panic_is_error_and_later_fetches_run() {
        let fetches = Fetches::new(Arc::new(PanickingSource));
        let (tx, rx) = mpsc::channel();
        let receive = || rx.recv_timeout(Duration::from_secs(30)).unwrap();
        // More panics than threads: if a panic ended its thread, the later fetches would not run.
        for _ in 0..2 * THREADS {
            fetches.demand(0, tx.clone());
            assert_eq!(receive(), Err(device::Error::Media));
        }
        fetches.demand(7, tx.clone());
        assert_eq!(receive(), Ok(7));
        fetches.close();
    }
}
