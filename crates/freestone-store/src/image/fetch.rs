//! What comes from the store: each thing once for all who wait for it, what is waited for before what
//! may be wanted soon.

use crate::rt::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use crate::rt::thread;
use crate::rt::time::{Duration, Instant};
use std::collections::{BTreeMap, VecDeque};

use freestone_core::device;

use super::find::{Content, Got};
use super::stat::Stats;
use crate::format::CHUNK_BYTES;
use crate::format::name::Name;
use crate::objects::Until;
use crate::store;

/// Fetches of an image at once.
const THREADS: usize = 32;
/// Of these, of what nobody waits for.
const AHEAD_AT_ONCE: usize = 16;
/// Chunks that may be wanted soon and are not fetched yet.
const AHEAD_MAX: usize = store::CHUNKS_MAX;
/// How long a thread waits for more to do.
const IDLE: Duration = Duration::from_secs(10);
/// Streams of reads that are told apart, and the most that is fetched before one.
const STREAMS: usize = 8;
const STREAM_CHUNKS_MAX: u64 = 32;
/// Chunks of a stream that are waited for before more is fetched: of two that lie side by side the next is
/// seldom wanted (of a guest's boot every other one was not).
const STREAM_WAITS: u32 = 2;

/// What is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// What was read first at another time.
    Trace,
    /// The maps of a segment.
    Segment(u32),
    /// All pages of a chunk.
    Chunk(Name),
    /// The pages of one unit of it.
    Unit(Name, usize),
}

/// Who waits for something.
pub trait Waiter: Send + 'static {
    /// It came; pages of a chunk are given.
    fn came(self, got: Option<Got>);
    /// It did not, and will not.
    fn failed(self, error: device::Error);
}

/// What comes, and who waits for it.
pub struct Fetches<W>(Arc<Inner<W>>);

struct Inner<W> {
    content: Arc<Content>,
    state: Mutex<State<W>>,
    more: Condvar,
}

struct State<W> {
    wanted: BTreeMap<Key, Wanted<W>>,
    demand: VecDeque<Key>,
    ahead: VecDeque<Key>,
    threads: usize,
    idle: usize,
    /// Threads that fetch what nobody waits for.
    ahead_running: usize,
    is_closed: bool,
    streams: VecDeque<Stream>,
}

struct Wanted<W> {
    since: Instant,
    begun: bool,
    waiters: Vec<W>,
}

/// Reads one behind the other, by blocks of a chunk's length.
struct Stream {
    next: u64,
    /// How often somebody waited.
    waits: u32,
}

impl Stream {
    /// Somebody is about to wait for a block of it: how many behind are fetched as well.
    fn waited(&mut self, block: u64) -> u64 {
        let doubled = self.waits.checked_sub(STREAM_WAITS).map(|more| 1_u64.checked_shl(more));
        let ahead = doubled.map_or(0, |ahead| ahead.unwrap_or(STREAM_CHUNKS_MAX).min(STREAM_CHUNKS_MAX));
        self.waits = self.waits.saturating_add(1);
        self.next = block + 1 + ahead;
        ahead
    }
}

impl<W: Waiter> Fetches<W> {
    pub fn new(content: Arc<Content>) -> Self {
        let state = State {
            wanted: BTreeMap::new(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            threads: 0,
            idle: 0,
            ahead_running: 0,
            is_closed: false,
            streams: VecDeque::new(),
        };
        Self(Arc::new(Inner { content, state: Mutex::new(state), more: Condvar::new() }))
    }

    /// Whoever waits is answered; nothing more is fetched.
    pub fn close(&self) {
        self.0.close();
    }

    /// Fetches what was read first at another time, if the store knows, and there is a cache.
    pub fn follow_trace(&self) {
        if self.0.content.cache().is_some() {
            let mut state = self.0.lock();
            state
                .wanted
                .insert(Key::Trace, Wanted { since: Instant::now(), begun: false, waiters: Vec::new() });
            state.ahead.push_back(Key::Trace);
            self.0.wake(&mut state);
        }
    }

    /// Goes on with the waiter when it came.
    pub fn want(&self, key: Key, waiter: W) {
        self.0.want(key, waiter);
    }

    /// Fetches what lies in a range, if there is time, and a cache.
    pub fn ahead(&self, offset: u64, len: u64) {
        if self.0.content.cache().is_some() {
            self.0.ahead(self.0.content.chunks(offset, len), None);
        }
    }

    /// Somebody is about to wait for a chunk: where two before it were waited for, what comes behind is fetched as
    /// well, twice as much each time.
    pub fn missed(&self, name: Name, offset: u64, len: u64) {
        let block = CHUNK_BYTES as u64;
        let number = offset / block;
        let ahead = {
            let streams = &mut self.0.lock().streams;
            let known = streams.iter().position(|stream| stream.next == number);
            let known = known.and_then(|at| streams.remove(at));
            streams.truncate(STREAMS - 1);
            let mut stream = known.unwrap_or(Stream { next: number, waits: 0 });
            let ahead = stream.waited(number);
            streams.push_front(stream);
            ahead
        };
        // The rest of the piece as well: it may lie in several chunks.
        let end = (offset / block + 1 + ahead) * block;
        if self.0.content.cache().is_some() {
            self.0.ahead(self.0.content.chunks(offset, (end - offset).max(len)), Some(name));
        }
    }
}

impl<W: Waiter> Inner<W> {
    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        (state.demand, state.ahead) = Default::default();
        let wanted = std::mem::take(&mut state.wanted);
        drop(state);
        self.more.notify_all();
        for waiter in wanted.into_values().flat_map(|wanted| wanted.waiters) {
            waiter.failed(device::Error::Gone);
        }
    }

    fn want(self: &Arc<Self>, key: Key, waiter: W) {
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            return waiter.failed(device::Error::Gone);
        }
        let new = || Wanted { since: Instant::now(), begun: false, waiters: Vec::new() };
        let wanted = state.wanted.entry(key).or_insert_with(new);
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
            self.fail_all(&|_| true, device::Error::NoMemory);
        }
    }

    /// Fetches chunks, if there is time, but for one.
    fn ahead(self: &Arc<Self>, names: Vec<Name>, but: Option<Name>) {
        let mut state = self.lock();
        for name in names.into_iter().filter(|name| Some(*name) != but) {
            let key = Key::Chunk(name);
            if state.is_closed || state.ahead.len() >= AHEAD_MAX || state.wanted.contains_key(&key) {
                continue;
            }
            state.wanted.insert(key, Wanted { since: Instant::now(), begun: false, waiters: Vec::new() });
            state.ahead.push_back(key);
            self.wake(&mut state);
        }
    }

    fn wake(self: &Arc<Self>, state: &mut State<W>) {
        // Each idle thread takes one.
        if state.idle >= state.demand.len() + state.ahead.len() {
            self.more.notify_one();
        } else if state.threads < THREADS {
            let of_thread = Arc::clone(self);
            let made = thread::Builder::new().name("image-fetch".into()).spawn(move || of_thread.work());
            state.threads += usize::from(made.is_ok());
        }
    }

    fn fail_all(&self, which: &dyn Fn(&Wanted<W>) -> bool, error: device::Error) {
        let mut state = self.lock();
        let keys: Vec<Key> = state
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

impl<W> State<W> {
    /// The next thing to fetch, and whether somebody waits for it.
    fn next(&mut self) -> Option<(Key, bool)> {
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

impl<W: Waiter> Inner<W> {
    /// A thread: fetches until there was nothing to do for a while.
    fn work(self: &Arc<Self>) {
        let content = &self.content;
        let is_over = || content.is_closed();
        while let Some((key, is_demand)) = self.wait() {
            let until = Until { is_over: &is_over, ..Until::within(content.config.timeout) };
            let outcome = match key {
                Key::Trace => {
                    // Only a hint: without it what is read is fetched when it is read.
                    let names = content.store.trace(&content.name, until).unwrap_or_else(|error| {
                        tracing::info!("{}: {error}", content.store.url());
                        Vec::new()
                    });
                    self.ahead(names, None);
                    Ok(None)
                }
                Key::Chunk(name) if !is_demand && content.cache().is_some_and(|cache| cache.has(&name)) => {
                    Ok(None)
                }
                Key::Segment(number) => content.load(number, until).map(|_| None),
                Key::Chunk(name) => content.fetch(&name, until).map(Some),
                Key::Unit(name, unit) => content.fetch_unit(&name, unit, until).map(Some),
            };
            let mut state = self.lock();
            state.ahead_running -= usize::from(!is_demand);
            let waiters = state.wanted.remove(&key).map_or(Vec::new(), |wanted| wanted.waiters);
            drop(state);
            if !is_demand && matches!(&outcome, Ok(Some(_))) {
                Stats::add(&content.stats.ahead, 1);
            }
            match outcome {
                Ok(got) => waiters.into_iter().for_each(|waiter| waiter.came(got.clone())),
                Err(error) => {
                    let answer = content.failed(&error);
                    for waiter in waiters {
                        waiter.failed(answer);
                    }
                    // It was asked too late or too often, rather than said no.
                    if matches!(&error, store::Error::Object { fault, .. } if fault.may_pass()) {
                        // They would only wait longer.
                        let timeout = content.config.timeout;
                        self.fail_all(&|wanted| wanted.since.elapsed() >= timeout, answer);
                    }
                }
            }
        }
    }

    /// The next thing to fetch; `None` where the thread is not needed any more.
    fn wait(&self) -> Option<(Key, bool)> {
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
