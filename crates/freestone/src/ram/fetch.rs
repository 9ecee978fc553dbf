//! Requests that cannot be done at once, and pages that come from the backing device for them.
//!
//! # The way of a page
//! * A read, or a write to a part of the page, meets a `Spilled` slot: the slot becomes `InFlight`, whoever needs the page
//!   meanwhile queues there, and the object is read from the device. No lock is held across that.
//! * When it has come the slot *lands*. In the packed layout the object goes to the pool, as it is, if memory allows: the
//!   page has come back, and its place on the device is free. Else the slot becomes `Spilled` as before. Either way those
//!   that waited get the content.
//! * A read that fails, is damaged, or is not answered in time lands the slot as it was, and is an I/O error for those
//!   who waited for the content. Later requests ask the device again.
//!
//! A whole page that is overwritten or discarded needs no read: it replaces `Spilled`, and waits only for a flight.
//!
//! Pages that one request needs are asked for together, those that lie near each other on the device in one read. A
//! sequential reader's next pages are asked for along with them.

use std::sync::Arc;

use super::stats::counter;
use super::{Inner, PAGE, Ram, piece};
use crate::clock::now_ms;
use crate::codec::Page;
use crate::device::{Buffer, Completion, Device, Error, IoBuf, Op, Request, Result, Tried};
use crate::pool::BackRef;
use crate::slot::{Kind, Landed, SlotGuard, Word};
use crate::spill::blocks::BLOCK_UNITS;
use crate::spill::layout;
use crate::spill::space::BLOCK_BYTES;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::{PAGE_BYTES, pin};

/// Pages that a read asks for at once.
const FETCH_PAGES: u64 = 256;
/// Pages that are read ahead of a sequential reader.
const AHEAD_PAGES: u64 = 64;
/// Blocks of one read from the device.
const READ_BLOCKS_MAX: u64 = 64;
/// Blocks between two objects that are read along, rather than asked for by two requests.
const GAP_BLOCKS: u64 = 4;
/// Sequential readers that are known at once.
const READERS: usize = 8;

/// A submitted request, and how far it came.
pub(super) struct Job {
    request: Request,
    at: usize,
    buffer: IoBuf,
    done: Completion,
    last_try: bool,
}

impl Job {
    /// A request that has just been submitted.
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self { request, at: 0, buffer, done, last_try: false }
    }

    /// It fails if it finds no memory now.
    pub fn for_the_last_time(self) -> Self {
        Self { last_try: true, ..self }
    }

    fn advance(&mut self, bytes: u64) {
        self.request = self.request.rest(bytes);
        self.at += if self.buffer.is_empty() { 0 } else { bytes as usize };
        self.last_try = false;
    }

    fn slot(&self) -> u64 {
        self.request.offset / PAGE
    }

    /// Whether it needs the old content of the page at which it stands.
    fn needs_content(&self) -> bool {
        let (_, _, len) = piece(self.request.offset, self.request.len);
        matches!(self.request.op, Op::Write | Op::WriteZeroes) && len < PAGE_BYTES
    }
}

/// Who waits for a slot in flight.
pub(super) enum Waiter {
    /// A read that wants the page's content.
    Page(Arc<Fetch>, Piece),
    /// Another request, which will try again.
    Retry(Ram, Job),
}

/// A part of a page, and where it goes in a request's buffer.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    at: usize,
    from: usize,
    len: usize,
}

/// A read that waits for pages.
pub(super) struct Fetch {
    ram: Ram,
    state: Mutex<Fetching>,
}

/// Lock order: `state` is taken before a slot while pages are gathered, and with no slot held when they arrive.
struct Fetching {
    job: Option<Job>,
    /// Bytes that are done when nothing is pending any more.
    bytes: u64,
    pending: usize,
    error: Option<Error>,
}

/// A page that is to be read from the device.
pub(super) struct Wanted {
    slot: u64,
    flight: u64,
    /// What its slot held.
    word: Word,
}

/// Where sequential readers are expected next.
#[derive(Default)]
pub(super) struct Readers {
    next: [AtomicU64; READERS],
    turn: AtomicU64,
}

impl Readers {
    /// Whether a read of `[first, end)` goes on where another ended.
    fn is_sequential(&self, first: u64, end: u64) -> bool {
        // Relaxed: a guess. 0 is nobody.
        let known = self.next.iter().find(|next| first != 0 && next.load(Ordering::Relaxed) == first);
        // Relaxed: whose place is taken does not matter.
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed) as usize % READERS;
        // Relaxed: as above.
        known.unwrap_or_else(|| &self.next[turn()]).store(end, Ordering::Relaxed);
        known.is_some()
    }
}

impl Ram {
    /// Begins a request. Where it does not have to wait, the runner carries on with it; a disk without one never waits.
    pub(super) fn go(&self, mut job: Job) {
        while let Some(rest) = self.slice(job) {
            if self.0.store.is_some() {
                return self.0.keeper.resume(self.clone(), rest);
            }
            job = rest;
        }
    }

    /// Carries on with a request for a bounded time. What is returned can go on at once.
    pub(super) fn slice(&self, mut job: Job) -> Option<Job> {
        let buffer = match job.request.op {
            Op::Read => job.buffer.get_mut(job.at..).map_or(Buffer::None, Buffer::Read),
            Op::Write => job.buffer.get(job.at..).map_or(Buffer::None, Buffer::Write),
            _ => Buffer::None,
        };
        match self.try_io(&job.request, buffer) {
            Ok(Tried::Done) => job.done.complete(Ok(()), job.buffer),
            Ok(Tried::Partly(bytes)) => {
                job.advance(bytes);
                return Some(job);
            }
            Ok(Tried::WouldBlock) if job.request.op == Op::Read => self.fetch(job),
            Ok(Tried::WouldBlock) if self.waits_for_page(&job) => return self.wait_for_page(job),
            // A discard needs no memory: its page has landed meanwhile.
            Ok(Tried::WouldBlock) if job.request.op == Op::Discard => return Some(job),
            Ok(Tried::WouldBlock) => self.wait_for_memory(job),
            Err(error) => job.done.complete(Err(error), job.buffer),
        }
        None
    }

    /// Whether it is its page that a request could not go on without; else it is memory.
    fn waits_for_page(&self, job: &Job) -> bool {
        let slot = job.slot();
        let word = pin::pinned(|pin| self.0.table.load(pin).leaf(slot).map(|leaf| leaf.peek(slot)));
        match word.map(Word::kind) {
            Some(Kind::InFlight) => true,
            Some(Kind::Spilled) => job.needs_content(),
            _ => false,
        }
    }

    fn wait_for_memory(&self, job: Job) {
        if job.last_try {
            self.0.counters.add(counter::FAILED_WRITES, 1);
            return job.done.complete(Err(Error::NoSpace), job.buffer);
        }
        self.0.keeper.wait_for_memory(self.clone(), job);
    }

    /// Queues a request on the page at which it stands; has the page read if it needs the content. Returned: it need not
    /// wait any more.
    fn wait_for_page(&self, job: Job) -> Option<Job> {
        let slot = job.slot();
        let mut job = Some(job);
        let wanted = pin::pinned(|pin| {
            let table = self.0.table.load(pin);
            let guard = table.leaf(slot)?.lock(slot);
            match guard.word().kind() {
                Kind::InFlight => {
                    let waiter = job.take().map(|job| Waiter::Retry(self.clone(), job))?;
                    self.0.flights.wait(&guard, waiter);
                    None
                }
                Kind::Spilled => {
                    let waiter = job.take().map(|job| Waiter::Retry(self.clone(), job))?;
                    Some(self.0.depart(table.id(), slot, guard, vec![waiter]))
                }
                _ => None,
            }
        });
        self.read(wanted.into_iter().collect());
        job
    }

    /// Reads the next pages of a request, from memory or from the device. The request goes on when all are there.
    fn fetch(&self, job: Job) {
        let first = job.request.offset;
        let end = (first / PAGE + FETCH_PAGES) * PAGE;
        let end = end.min(first + job.request.len);
        let base = job.at;
        let fetching = Fetching { job: Some(job), bytes: end - first, pending: 1, error: None };
        let fetch = Arc::new(Fetch { ram: self.clone(), state: Mutex::new(fetching) });
        let mut wanted = Vec::new();
        let mut offset = first;
        while offset < end {
            let (slot, from, len) = piece(offset, end - offset);
            let piece = Piece { at: base + (offset - first) as usize, from, len };
            wanted.extend(self.gather(&fetch, slot, piece));
            offset += len as u64;
        }
        let next = end.div_ceil(PAGE);
        if self.0.comes_back() && self.0.readers.is_sequential(first / PAGE, next) {
            wanted.extend(self.ahead(next, AHEAD_PAGES));
        }
        self.read(wanted);
        fetch.arrived(None, Ok(()));
    }

    /// Gets one page for a read: now, or by queueing on it.
    fn gather(&self, fetch: &Arc<Fetch>, slot: u64, piece: Piece) -> Option<Wanted> {
        loop {
            let mut fetching = fetch.state.lock();
            let Fetching { job: Some(job), error, .. } = &mut *fetching else { return None };
            let into = job.buffer.get_mut(piece.at..piece.at + piece.len)?;
            let request = Request::read(slot * PAGE + piece.from as u64, piece.len as u64);
            let waits = match self.try_io(&request, Buffer::Read(into)) {
                Ok(tried) => tried == Tried::WouldBlock,
                Err(failed) => {
                    *error = error.or(Some(failed));
                    false
                }
            };
            if !waits {
                return None;
            }
            fetching.pending += 1;
            drop(fetching);
            let queued = pin::pinned(|pin| {
                let table = self.0.table.load(pin);
                let guard = table.leaf(slot)?.lock(slot);
                let waiter = || Waiter::Page(Arc::clone(fetch), piece);
                match guard.word().kind() {
                    Kind::InFlight => {
                        self.0.flights.wait(&guard, waiter());
                        Some(None)
                    }
                    Kind::Spilled => Some(Some(self.0.depart(table.id(), slot, guard, vec![waiter()]))),
                    _ => None,
                }
            });
            match queued {
                Some(wanted) => return wanted,
                // It has come meanwhile.
                None => fetch.state.lock().pending -= 1,
            }
        }
    }

    /// The pages from `first` on that are spilled, put in flight with nobody waiting; none where memory is short.
    fn ahead(&self, first: u64, pages: u64) -> Vec<Wanted> {
        // Not what would push out others at once.
        let room = self.0.marks().map_or(u64::MAX, |(high, _)| high.saturating_sub(self.0.pool.pages()));
        let end = (first + pages.min(room)).min(self.0.size() / PAGE);
        let wanted = |slot| {
            pin::pinned(|pin| {
                let table = self.0.table.load(pin);
                let leaf = table.leaf(slot).filter(|leaf| leaf.peek(slot).kind() == Kind::Spilled)?;
                let guard = leaf.lock(slot);
                let spilled = guard.word().kind() == Kind::Spilled;
                spilled.then(|| self.0.depart(table.id(), slot, guard, Vec::new()))
            })
        };
        (first..end).filter_map(wanted).collect()
    }

    /// Has pages in memory that will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, len: u64) {
        if self.0.comes_back() && len > 0 {
            let first = offset / PAGE;
            let pages = (offset.saturating_add(len).div_ceil(PAGE) - first).min(FETCH_PAGES);
            self.read(self.ahead(first, pages));
        }
    }

    /// Reads pages that are in flight, near ones together.
    fn read(&self, mut wanted: Vec<Wanted>) {
        let Some(store) = &self.0.store else { return };
        wanted.sort_unstable_by_key(|wanted| wanted.word.location());
        let gap = if store.is_packed() { GAP_BLOCKS } else { 0 };
        while !wanted.is_empty() {
            let (first, blocks) = store.blocks_of(wanted[0].word);
            let mut end = first + u64::from(blocks);
            let near = wanted.iter().skip(1).take_while(|wanted| {
                let (start, blocks) = store.blocks_of(wanted.word);
                let to = end.max(start + u64::from(blocks));
                let joins = start <= end + gap && to - first <= READ_BLOCKS_MAX;
                end = if joins { to } else { end };
                joins
            });
            let count = 1 + near.count();
            let rest = wanted.split_off(count);
            let together = std::mem::replace(&mut wanted, rest);
            // Weak: a device that never answers keeps no disk in memory.
            let ram = Arc::downgrade(&self.0);
            store.read(first, (end - first) as u32, move |outcome, buffer| {
                let Some(ram) = ram.upgrade().map(Ram) else { return };
                if outcome.is_err() && together.len() > 1 {
                    // One of them may be to blame. This is a thread of the device, which must not be asked from here.
                    return ram.0.keeper.reread(ram.clone(), together);
                }
                for wanted in together {
                    ram.0.came(&wanted, first, outcome, buffer);
                }
            });
        }
    }
}

impl Ram {
    /// Reads pages in flight again, each for itself; those that nobody waits for land as they were.
    pub(super) fn read_one_by_one(&self, wanted: Vec<Wanted>) {
        for wanted in wanted {
            match self.0.flights.owner(wanted.flight) {
                Some(owner) if !self.0.flights.any_waiter(wanted.flight, |_| true) => {
                    self.0.land(owner, wanted.flight, None, Err(Error::Media));
                }
                Some(_) => self.read(vec![wanted]),
                None => {}
            }
        }
    }
}

impl Fetch {
    /// One pending page has come, or failed; the last one carries the request on.
    fn arrived(&self, piece: Option<Piece>, outcome: Result<()>) {
        self.deliver(piece, outcome.map(|()| None));
    }

    fn deliver(&self, piece: Option<Piece>, outcome: Result<Option<&Page>>) {
        let mut fetching = self.state.lock();
        match (outcome, piece, &mut fetching.job) {
            (Ok(Some(page)), Some(Piece { at, from, len }), Some(job)) => {
                job.buffer[at..at + len].copy_from_slice(&page[from..from + len]);
            }
            (Err(error), ..) => fetching.error = fetching.error.or(Some(error)),
            _ => {}
        }
        fetching.pending -= 1;
        if fetching.pending > 0 {
            return;
        }
        let (Some(mut job), bytes, error) = (fetching.job.take(), fetching.bytes, fetching.error) else {
            return;
        };
        drop(fetching);
        match error {
            Some(error) => job.done.complete(Err(error), job.buffer),
            None if bytes == job.request.len => job.done.complete(Ok(()), job.buffer),
            None => {
                job.advance(bytes);
                self.ram.0.keeper.resume(self.ram.clone(), job);
            }
        }
    }
}

impl Inner {
    /// Whether pages that were read stay in memory.
    fn comes_back(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.is_packed())
    }

    fn depart(&self, table: u32, slot: u64, guard: SlotGuard<'_>, waiting: Vec<Waiter>) -> Wanted {
        let word = guard.word();
        Wanted {
            slot,
            flight: self.flights.depart(guard, BackRef::new(table, slot).bits(), now_ms(), waiting),
            word,
        }
    }

    /// What was read from block `first` on has come, or failed.
    fn came(&self, wanted: &Wanted, first: u64, outcome: Result<()>, buffer: &[u8]) {
        let Some(store) = &self.store else { return };
        let at = (wanted.word.location() - first * BLOCK_UNITS) as usize * layout::UNIT_BYTES;
        let owner = self.flights.owner(wanted.flight);
        let object = match (outcome, owner) {
            // It landed by other hands: too late, or its table is gone.
            (_, None) => return,
            (Err(error), _) => Err(error),
            (Ok(()), Some(owner)) if store.is_packed() => layout::object_at(
                buffer,
                at,
                owner,
                wanted.word.spilled_bytes(),
                wanted.word.algorithm() as u8,
            )
            .ok_or_else(|| {
                store.failed_read();
                tracing::warn!("page {} came back damaged from the backing device", wanted.slot);
                Error::Media
            }),
            (Ok(()), Some(_)) => buffer.get(at..at + BLOCK_BYTES).ok_or(Error::Media),
        };
        let (Ok(object), Some(owner)) = (object, owner) else {
            self.land(owner.unwrap_or_default(), wanted.flight, None, Err(Error::Media));
            return;
        };
        let changes = |waiter: &Waiter| matches!(waiter, Waiter::Retry(_, job) if job.needs_content());
        if let Some(Waiter::Retry(ram, job)) = self.flights.take_waiter(wanted.flight, changes) {
            return self.change(ram, job, owner, wanted, object);
        }
        // In the kernel's layout it stays there, as it does in the kernel.
        let back = if store.is_packed() { self.take_back(owner, object, wanted) } else { None };
        self.land(owner, wanted.flight, back, Ok(object));
    }

    /// Changes a part of a page that came from the device for that: what goes to memory is the changed page, so memory
    /// for one object is enough.
    fn change(&self, ram: Ram, mut job: Job, owner: u64, wanted: &Wanted, object: &[u8]) {
        let mut page = [0; PAGE_BYTES];
        let unpacked = self.unpack_spilled(wanted.word, object, &mut page);
        let (_, from, len) = piece(job.request.offset, job.request.len);
        match (job.request.op, job.buffer.get(job.at..job.at + len)) {
            (Op::Write, Some(data)) => page[from..from + len].copy_from_slice(data),
            _ => page[from..from + len].fill(0),
        }
        let stored = unpacked.and_then(|()| self.store_page(BackRef::from_bits(owner), &page));
        let back = stored.as_ref().ok().copied();
        let landed = self.land(owner, wanted.flight, back, unpacked.map(|()| object));
        match stored {
            Err(Error::NoSpace) => ram.wait_for_memory(job),
            Err(error) => {
                self.counters.add(counter::FAILED_WRITES, 1);
                job.done.complete(Err(error), job.buffer);
            }
            // The page landed by other hands meanwhile.
            Ok(_) if !landed => self.keeper.resume(ram, job),
            Ok(_) if job.request.len == len as u64 => job.done.complete(Ok(()), job.buffer),
            Ok(_) => {
                job.advance(len as u64);
                self.keeper.resume(ram, job);
            }
        }
    }

    /// Stores an object that came from the device; `None` where memory is short.
    fn take_back(&self, owner: u64, object: &[u8], wanted: &Wanted) -> Option<Word> {
        let location = self.pool.store(object, BackRef::from_bits(owner)).ok();
        if location.is_none() {
            self.keeper.kick();
        }
        location.map(|location| wanted.word.back_at(location))
    }

    /// Ends a flight: `back` is where the page is in memory now, if it came back. Those that waited get the content, or
    /// the error. False: it had ended.
    fn land(&self, owner: u64, flight: u64, back: Option<Word>, content: Result<&[u8]>) -> bool {
        let landed = pin::pinned(|pin| {
            let table = self.table.load(pin);
            let owner = BackRef::from_bits(owner);
            let leaf = table.leaf(owner.slot()).filter(|_| table.id() == owner.table())?;
            let guard = leaf.lock(owner.slot());
            if guard.word() != Word::in_flight(flight) {
                return None;
            }
            let now = self.ages.now();
            Some(self.flights.land(guard, |held| match back {
                Some(word) => word.with_age(now),
                None => held.touched(now),
            }))
        });
        let Some(Landed { held, waiting }) = landed else {
            if let Some(back) = back {
                self.release(back);
            }
            return false;
        };
        if let Some(back) = back {
            self.account_back(back);
            self.release(held);
        }
        if waiting.is_empty() {
            return true;
        }
        let mut page = [0; PAGE_BYTES];
        let outcome = content.and_then(|object| self.unpack_spilled(held, object, &mut page));
        if outcome.is_err() {
            self.counters.add(counter::FAILED_READS, 1);
        }
        for waiter in waiting {
            match waiter {
                Waiter::Page(fetch, piece) => fetch.deliver(Some(piece), outcome.map(|()| Some(&page))),
                Waiter::Retry(ram, job) => match outcome {
                    Err(error) if job.needs_content() => job.done.complete(Err(error), job.buffer),
                    Ok(()) if back.is_none() && job.needs_content() => {
                        ram.wait_for_memory(job);
                    }
                    _ => self.keeper.resume(ram, job),
                },
            }
        }
        true
    }

    fn unpack_spilled(&self, held: Word, object: &[u8], page: &mut Page) -> Result<()> {
        if held.spilled_bytes() == PAGE_BYTES {
            page.copy_from_slice(object.get(..PAGE_BYTES).ok_or(Error::Media)?);
            return Ok(());
        }
        self.codecs.decompress(held.algorithm(), object, page)
    }

    /// Has flights failed for which the device has taken too long.
    pub(super) fn hand_over_late_flights(&self) {
        let Some(store) = &self.store else { return };
        let since = now_ms().saturating_sub(store.timeout_ms());
        let late = self.flights.departed_before(since);
        if !late.is_empty() {
            let (reads, ms) = (late.len(), store.timeout_ms());
            tracing::warn!("the backing device has not answered {reads} reads within {ms} ms");
            self.keeper.fail(late);
        }
    }

    /// Fails a flight that is late.
    pub(super) fn fail_flight(&self, flight: u64, owner: u64) {
        if let Some(store) = &self.store {
            store.failed_read();
        }
        self.land(owner, flight, None, Err(Error::Media));
    }

    /// The table of this slot is gone: who waited for it goes on with the new table, whose pages are empty.
    pub(super) fn answer_forgotten(&self, Landed { held, waiting }: Landed<Waiter>) {
        self.release(held);
        for waiter in waiting {
            match waiter {
                Waiter::Page(fetch, piece) => fetch.deliver(Some(piece), Ok(Some(&[0; PAGE_BYTES]))),
                Waiter::Retry(ram, job) => self.keeper.resume(ram, job),
            }
        }
    }
}
