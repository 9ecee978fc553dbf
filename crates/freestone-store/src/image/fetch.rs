//! What comes from the store: each thing once for all who wait for it, what is waited for before what
//! may be wanted soon.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device;

use super::find::{Got, Shared};
use super::is_hanging;
use super::job::Piece;
use super::stat::Stats;
use crate::cache::Outcome;
use crate::format::name::Name;
use crate::format::{CHUNK_BYTES, PAGE, UNIT_PAGES};
use crate::objects::Until;
use crate::store::Result;

/// Fetches of an image at once.
const THREADS: usize = 32;
/// Of these, of what nobody waits for.
const AHEAD_AT_ONCE: usize = 24;
/// Chunks that may be wanted soon and are not fetched yet.
const AHEAD_MAX: usize = 1024;
/// How long a thread waits for more to do.
const IDLE: Duration = Duration::from_secs(10);
/// How long another server of the host is waited for that fetches the same.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// How long the cache may take to keep a chunk.
const KEEP_MAX: Duration = Duration::from_secs(5);
/// Streams of reads that are told apart, and the most that is fetched before one.
const STREAMS: usize = 8;
const STREAM_CHUNKS_MAX: u64 = 32;

/// What is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Key {
    /// The maps of a segment.
    Segment(u32),
    /// All pages of a chunk.
    Chunk(Name),
    /// The pages of one unit of it.
    Unit(Name, usize),
}

/// What comes, and who waits for it.
pub struct Fetches {
    shared: Weak<Shared>,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    wanted: HashMap<Key, Wanted>,
    demand: VecDeque<Key>,
    ahead: VecDeque<Key>,
    threads: usize,
    idle: usize,
    /// Threads that fetch what nobody waits for.
    ahead_running: usize,
    is_closed: bool,
    streams: VecDeque<Stream>,
}

struct Wanted {
    since: Instant,
    begun: bool,
    waiters: Vec<Piece>,
}

/// Reads one behind the other, by blocks of a chunk's length.
struct Stream {
    next: u64,
    window: u64,
}

impl Fetches {
    pub fn new(shared: Weak<Shared>) -> Self {
        Self { shared, state: Mutex::default(), more: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever waits is answered; nothing more is fetched.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        (state.demand, state.ahead) = Default::default();
        let wanted = std::mem::take(&mut state.wanted);
        drop(state);
        self.more.notify_all();
        for piece in wanted.into_values().flat_map(|wanted| wanted.waiters) {
            piece.fail(device::Error::Gone);
        }
    }

    /// Goes on with the piece when it came.
    pub fn want(&self, key: Key, piece: Piece) {
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            return piece.fail(device::Error::Gone);
        }
        let new = || Wanted { since: Instant::now(), begun: false, waiters: Vec::new() };
        let wanted = state.wanted.entry(key).or_insert_with(new);
        let is_first = wanted.waiters.is_empty() && !wanted.begun;
        wanted.waiters.push(piece);
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
    fn ahead(&self, names: Vec<Name>, but: Option<Name>) {
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

    fn wake(&self, state: &mut State) {
        if state.idle > 0 {
            self.more.notify_one();
        } else if state.threads < THREADS {
            let Some(shared) = self.shared.upgrade() else { return };
            let made = thread::Builder::new().name("image-fetch".into()).spawn(move || {
                let weak = Arc::downgrade(&shared);
                drop(shared);
                work(&weak);
            });
            state.threads += usize::from(made.is_ok());
        }
    }

    fn fail_all(&self, which: &dyn Fn(&Wanted) -> bool, error: device::Error) {
        let mut state = self.lock();
        let keys: Vec<Key> = state
            .wanted
            .iter()
            .filter(|(_, wanted)| !wanted.begun && which(wanted))
            .map(|(key, _)| *key)
            .collect();
        let failed: Vec<Wanted> = keys.iter().filter_map(|key| state.wanted.remove(key)).collect();
        drop(state);
        for piece in failed.into_iter().flat_map(|wanted| wanted.waiters) {
            piece.fail(error);
        }
    }
}

impl State {
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

/// A thread: fetches until there was nothing to do for a while.
fn work(weak: &Weak<Shared>) {
    loop {
        // Nobody waits for an image that is gone.
        let Some(shared) = weak.upgrade() else { return };
        let fetches = &shared.fetches;
        let mut state = fetches.lock();
        let (key, is_demand) = loop {
            if let Some(next) = state.next() {
                break next;
            }
            if state.is_closed {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            let (woken, waited) =
                fetches.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.demand.is_empty() && state.ahead.is_empty() {
                state.threads -= 1;
                return;
            }
        };
        drop(state);
        let is_over = || shared.is_closed();
        let until = Until { is_over: &is_over, ..Until::within(shared.config.timeout) };
        let outcome = match key {
            Key::Segment(number) => shared.load(number, until).map(|_| None),
            Key::Chunk(name) => shared.fetch(&name, until).map(Some),
            Key::Unit(name, unit) => shared.fetch_unit(&name, unit, until).map(Some),
        };
        let mut state = fetches.lock();
        state.ahead_running -= usize::from(!is_demand);
        let waiters = state.wanted.remove(&key).map_or(Vec::new(), |wanted| wanted.waiters);
        drop(state);
        if !is_demand && outcome.is_ok() {
            Stats::add(&shared.stats.ahead, 1);
        }
        match outcome {
            Ok(got) => {
                for mut piece in waiters {
                    if let Some(got) = &got {
                        piece.add(got.clone());
                    }
                    piece.go_on();
                }
            }
            Err(error) => {
                let answer = shared.failed(&error);
                for piece in waiters {
                    piece.fail(answer);
                }
                if is_hanging(&error) {
                    // They would only wait longer.
                    let timeout = shared.config.timeout;
                    fetches.fail_all(&|wanted| wanted.since.elapsed() >= timeout, answer);
                }
            }
        }
    }
}

impl Shared {
    /// The pages of a chunk from the store, which the cache then has; or from there, where another server
    /// fetched them meanwhile.
    pub fn fetch(&self, name: &Name, until: Until<'_>) -> Result<Got> {
        let got = |pages| Got { name: *name, first: 0, is_all: true, pages: Arc::new(pages) };
        let Some(cache) = self.cache() else { return self.chunk(name, until).map(got) };
        // Held until the cache has it.
        let (_lock, _) = cache.lock_fetch(name, until.at_most(LOCK_WAIT));
        if let Some(entry) = cache.find(name) {
            let mut pages = vec![0; entry.pages() * PAGE];
            if entry.read(0, &mut pages, true) == Outcome::Done {
                Stats::add(&self.stats.found, 1);
                return Ok(got(pages));
            }
            cache.discard(name);
        }
        let pages = self.chunk(name, until)?;
        self.cache_took(cache.keep(name, &pages, until.at_most(KEEP_MAX)));
        Ok(got(pages))
    }

    fn chunk(&self, name: &Name, until: Until<'_>) -> Result<Vec<u8>> {
        let pages = self.store.chunk(name, until)?;
        Stats::add(&self.stats.fetched, 1);
        Stats::add(&self.stats.fetched_bytes, pages.len() as u64);
        Ok(pages)
    }

    /// The pages of a unit of a chunk from the store; zeroes behind the end of the chunk.
    fn fetch_unit(&self, name: &Name, unit: usize, until: Until<'_>) -> Result<Got> {
        let mut pages = self.store.unit(name, unit, until)?;
        Stats::add(&self.stats.fetched, 1);
        Stats::add(&self.stats.fetched_bytes, pages.len() as u64);
        pages.resize(UNIT_PAGES * PAGE, 0);
        Ok(Got { name: *name, first: unit * UNIT_PAGES, is_all: false, pages: Arc::new(pages) })
    }

    /// Fetches what lies in a range, if there is time, and a cache.
    pub fn ahead(&self, offset: u64, len: u64) {
        if self.cache().is_some() {
            self.fetches.ahead(self.chunks(offset, len), None);
        }
    }

    /// Somebody is about to wait for a chunk: where several in a row were waited for, what comes behind is fetched
    /// as well, twice as much each time.
    pub fn missed(&self, name: Name, offset: u64, len: u64) {
        let block = CHUNK_BYTES as u64;
        let number = offset / block;
        let ahead = {
            let streams = &mut self.fetches.lock().streams;
            let known = streams.iter().position(|stream| stream.next == number);
            let known = known.and_then(|at| streams.remove(at));
            streams.truncate(STREAMS - 1);
            let mut stream = known.unwrap_or(Stream { next: number, window: 0 });
            let ahead = stream.window;
            stream.window = (stream.window * 2).clamp(1, STREAM_CHUNKS_MAX);
            stream.next = number + 1 + ahead;
            streams.push_front(stream);
            ahead
        };
        // The rest of the piece as well: it may lie in several chunks.
        let end = (offset / block + 1 + ahead) * block;
        if self.cache().is_some() {
            self.fetches.ahead(self.chunks(offset, (end - offset).max(len)), Some(name));
        }
    }
}

const _: () = assert!(AHEAD_AT_ONCE < THREADS && CHUNK_BYTES.is_multiple_of(UNIT_PAGES * PAGE));
