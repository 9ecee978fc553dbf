//! What comes from elsewhere: each thing once for all who wait for it, what is waited for before what may
//! be wanted soon.
//!
//! Threads are made while there is something to fetch that no idle one takes, up to a bound, and end when
//! there was nothing for a while, or when it is closed. The one lock is held for a few instructions: nothing is
//! fetched and nobody is answered under it.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device;

use crate::rt::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use crate::rt::thread;
use crate::rt::time::{Duration, Instant};

/// Fetches at once.
const THREADS: usize = if cfg!(loom) { 2 } else { 32 };
/// Of these, of what nobody waits for.
const AHEAD_AT_ONCE: usize = if cfg!(loom) { 1 } else { 16 };
/// Things that may be wanted soon and are not fetched yet.
pub const AHEAD_MAX: usize = 1 << 16;
/// How long a thread waits for more to do.
const IDLE: Duration = Duration::from_secs(10);

/// Where things come from.
pub trait Source: Send + Sync + 'static {
    /// What is fetched.
    type Key: Copy + Ord + Send;
    /// What comes.
    type Got: Clone;

    /// Fetches one thing, for somebody who waits where it `is_wanted`. `ahead` gets what may be wanted soon.
    ///
    /// # Errors
    /// What those who wait are told.
    fn fetch(&self, key: Self::Key, is_wanted: bool, ahead: &mut Vec<Self::Key>)
    -> Result<Self::Got, Failed>;

    /// How long a fetch may take.
    fn timeout(&self) -> Duration;
}

/// Why something did not come.
pub struct Failed {
    /// What those who wait are told.
    pub error: device::Error,
    /// It was asked too late or too often, rather than said no: who has waited as long as a fetch may take
    /// would only wait longer.
    pub is_hanging: bool,
}

/// Who waits for something.
pub trait Waiter<G>: Send + 'static {
    /// It came.
    fn came(self, got: G);
    /// It did not, and will not.
    fn failed(self, error: device::Error);
}

/// What comes, and who waits for it.
pub struct Fetches<S: Source, W>(Arc<Inner<S, W>>);

struct Inner<S: Source, W> {
    source: Arc<S>,
    state: Mutex<State<S::Key, W>>,
    more: Condvar,
}

struct State<K, W> {
    wanted: BTreeMap<K, Wanted<W>>,
    demand: VecDeque<K>,
    ahead: VecDeque<K>,
    threads: usize,
    idle: usize,
    /// Threads that fetch what nobody waits for.
    ahead_running: usize,
    is_closed: bool,
}

struct Wanted<W> {
    since: Instant,
    begun: bool,
    waiters: Vec<W>,
}

impl<W> Wanted<W> {
    fn new() -> Self {
        Self { since: Instant::now(), begun: false, waiters: Vec::new() }
    }
}

impl<S: Source, W: Waiter<S::Got>> Fetches<S, W> {
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

    /// Whoever waits is answered; nothing more is fetched.
    pub fn close(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        (state.demand, state.ahead) = Default::default();
        let wanted = std::mem::take(&mut state.wanted);
        drop(state);
        self.0.more.notify_all();
        for waiter in wanted.into_values().flat_map(|wanted| wanted.waiters) {
            waiter.failed(device::Error::Gone);
        }
    }

    /// Goes on with the waiter when it came.
    pub fn want(&self, key: S::Key, waiter: W) {
        let mut state = self.0.lock();
        if state.is_closed {
            drop(state);
            return waiter.failed(device::Error::Gone);
        }
        let wanted = state.wanted.entry(key).or_insert_with(Wanted::new);
        let is_first = wanted.waiters.is_empty() && !wanted.begun;
        wanted.waiters.push(waiter);
        if is_first {
            // It may be among what is fetched ahead as well: the second look finds it begun.
            state.demand.push_back(key);
            self.wake(&mut state);
        }
        let stranded = state.threads == 0;
        drop(state);
        if stranded {
            self.0.fail_all(&|_| true, device::Error::NoMemory);
        }
    }

    /// Fetches these, if there is time.
    pub fn ahead(&self, keys: impl IntoIterator<Item = S::Key>) {
        let mut state = self.0.lock();
        for key in keys {
            if state.is_closed || state.ahead.len() >= AHEAD_MAX || state.wanted.contains_key(&key) {
                continue;
            }
            state.wanted.insert(key, Wanted::new());
            state.ahead.push_back(key);
            self.wake(&mut state);
        }
    }

    fn wake(&self, state: &mut State<S::Key, W>) {
        // Each idle thread takes one. What may be wanted soon and has to wait counts for nothing: who
        // came later and waits would find as many threads as there may be, and none that is woken.
        let may_begin = state.ahead.len().min(AHEAD_AT_ONCE - state.ahead_running);
        if state.idle >= state.demand.len() + may_begin {
            self.0.more.notify_one();
        } else if state.threads < THREADS {
            let of_thread = Self(Arc::clone(&self.0));
            let made = thread::Builder::new().name("image-fetch".into()).spawn(move || of_thread.work());
            state.threads += usize::from(made.is_ok());
        }
    }

    /// A thread: fetches until there was nothing to do for a while.
    fn work(&self) {
        while let Some((key, is_demand)) = self.0.wait() {
            let mut ahead = Vec::new();
            // A fault of ours in what a hostile store may send: who waits is told, and the thread is counted.
            let fetch = AssertUnwindSafe(|| self.0.source.fetch(key, is_demand, &mut ahead));
            let outcome =
                catch_unwind(fetch).unwrap_or(Err(Failed { error: device::Error::Media, is_hanging: false }));
            self.ahead(ahead);
            let mut state = self.0.lock();
            state.ahead_running -= usize::from(!is_demand);
            let waiters = state.wanted.remove(&key).map_or(Vec::new(), |wanted| wanted.waiters);
            drop(state);
            match outcome {
                Ok(got) => waiters.into_iter().for_each(|waiter| waiter.came(got.clone())),
                Err(Failed { error, is_hanging }) => {
                    for waiter in waiters {
                        waiter.failed(error);
                    }
                    if is_hanging {
                        let timeout = self.0.source.timeout();
                        self.0.fail_all(&|wanted| wanted.since.elapsed() >= timeout, error);
                    }
                }
            }
        }
    }

    /// Threads that have nothing to do have waited for as long as they do.
    #[cfg(all(loom, test))]
    pub fn time_passes(&self) {
        self.0.more.time_passes();
    }
}

impl<S: Source, W: Waiter<S::Got>> Inner<S, W> {
    fn lock(&self) -> MutexGuard<'_, State<S::Key, W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail_all(&self, which: &dyn Fn(&Wanted<W>) -> bool, error: device::Error) {
        let mut state = self.lock();
        let keys: Vec<S::Key> = state
            .wanted
            .iter()
            .filter(|(_, wanted)| !wanted.begun && which(wanted))
            .map(|(key, _)| *key)
            .collect();
        let failed: Vec<Wanted<W>> = keys.iter().filter_map(|key| state.wanted.remove(key)).collect();
        drop(state);
        for waiter in failed.into_iter().flat_map(|wanted| wanted.waiters) {
            waiter.failed(error);
        }
    }
}

impl<K: Copy + Ord, W> State<K, W> {
    /// The next thing to fetch, and whether somebody waits for it.
    fn next(&mut self) -> Option<(K, bool)> {
        while let Some(key) = self.demand.pop_front() {
            if let Some(wanted) = self.wanted.get_mut(&key).filter(|wanted| !wanted.begun) {
                wanted.begun = true;
                return Some((key, true));
            }
        }
        while self.ahead_running < AHEAD_AT_ONCE
            && let Some(key) = self.ahead.pop_front()
        {
            if let Some(wanted) = self.wanted.get_mut(&key).filter(|wanted| !wanted.begun) {
                wanted.begun = true;
                self.ahead_running += 1;
                return Some((key, false));
            }
        }
        None
    }
}

impl<S: Source, W: Waiter<S::Got>> Inner<S, W> {
    /// The next thing to fetch; `None` where the thread is not needed any more.
    fn wait(&self) -> Option<(S::Key, bool)> {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.next() {
                return Some(next);
            }
            if state.is_closed {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let (woken, waited) = self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.demand.is_empty() && state.ahead.is_empty() {
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

    struct Broken;

    impl Source for Broken {
        type Key = u8;
        type Got = u8;

        fn fetch(&self, key: u8, _: bool, _: &mut Vec<u8>) -> Result<u8, Failed> {
            assert_ne!(key, 0, "on purpose");
            Ok(key)
        }

        fn timeout(&self) -> Duration {
            Duration::from_secs(60)
        }
    }

    impl Waiter<u8> for mpsc::Sender<Result<u8, device::Error>> {
        fn came(self, got: u8) {
            self.send(Ok(got)).unwrap();
        }

        fn failed(self, error: device::Error) {
            self.send(Err(error)).unwrap();
        }
    }

    #[test]
    fn a_fetch_that_panics_is_an_error_and_the_next_ones_go_on() {
        let fetches = Fetches::new(Arc::new(Broken));
        let (tx, rx) = mpsc::channel();
        let answer = || rx.recv_timeout(Duration::from_secs(30)).unwrap();
        // More often than there may be threads.
        for _ in 0..2 * THREADS {
            fetches.want(0, tx.clone());
            assert_eq!(answer(), Err(device::Error::Media));
        }
        fetches.want(7, tx.clone());
        assert_eq!(answer(), Ok(7));
        fetches.close();
    }
}
