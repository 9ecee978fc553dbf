//! Reads that have to wait: gathers their pages from memory, the backing device, and a base on a
//! disk, and completes when all have arrived.
//!
//! The pages of a request are requested together, neighbouring ones in one read, and the next pages
//! of a sequential reader along with them.

use std::ops::Range;
use std::sync::Arc;

use super::chain::View;
use super::job::Job;
use super::layer::Layer;
use super::parent::{Base, Parent, ReadEnd};
use super::waiter::{Fetch, Fetching, PageToRead, Piece, Waiter};
use super::{Inner, PAGE, Ram, piece};
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::pin::Pin;
use freestone_core::slot::{Kind, SlotGuard};
use freestone_core::sync::Mutex;
use freestone_core::{PAGE_BYTES, pin};

/// Maximum pages that a read fetches at once.
const FETCH_PAGES: u64 = 256;
/// Pages read ahead for a sequential reader.
const AHEAD_PAGES: u64 = 64;

/// Location of a slot's page for a request that has to wait.
pub(super) enum Place<'a> {
    /// In memory, or a hole.
    Resident,
    /// On the backing device or in flight, in this slot.
    Slot(&'a Layer, SlotGuard<'a>),
    Base(&'a Base),
}

/// Calls `then` with the location of a slot's page.
pub(super) fn locate<R>(view: &View, pin: &Pin<'_>, slot: u64, then: impl FnOnce(Place<'_>) -> R) -> R {
    view.with_page(pin, slot, |found| match found {
        Some((layer, guard)) if matches!(guard.word().kind(), Kind::InFlight | Kind::Spilled) => {
            then(Place::Slot(layer, guard))
        }
        Some(_) => then(Place::Resident),
        None => locate_below(&view.parent, pin, slot, then),
    })
}

/// As [`locate`], for a page of the parent.
fn locate_below<R>(parent: &Parent, pin: &Pin<'_>, slot: u64, then: impl FnOnce(Place<'_>) -> R) -> R {
    match parent {
        Parent::Staged(staged) => match staged.active_source(pin).filter(|here| here.has(slot)) {
            Some(here) => then(Place::Base(&here.base)),
            None => locate_below(&staged.below, pin, slot, then),
        },
        _ if !parent.reaches(slot) => then(Place::Resident),
        Parent::Nothing => then(Place::Resident),
        Parent::Device(base) => then(Place::Base(base)),
        Parent::Snapshot(ram) => {
            // Box the closure: otherwise each level would instantiate another function.
            let then: Box<dyn FnOnce(Place<'_>) -> R + '_> = Box::new(then);
            locate(ram.0.view.load(pin), pin, slot, then)
        }
    }
}

/// What the caller must do for a request that waits for a page.
pub(super) enum Queued {
    /// Nothing: the page is already in flight.
    InFlight,
    /// Read the page from the backing device.
    PageToRead(PageToRead),
    /// Read the page from the base; the request is not queued.
    Base(Base),
}

impl Inner {
    /// Queues a waiter on a page. `None`: the page is available.
    pub(super) fn queue(&self, slot: u64, waiter: impl FnOnce(bool) -> Option<Waiter>) -> Option<Queued> {
        pin::pinned(|pin| {
            let view = self.view.load(pin);
            let is_own = |layer: &Layer| std::ptr::eq(layer, &raw const *view.layer);
            locate(view, pin, slot, |place| match place {
                Place::Resident => None,
                Place::Base(base) => Some(Queued::Base(base.clone())),
                Place::Slot(layer, guard) => Some(match guard.word().kind() {
                    Kind::InFlight => {
                        self.family.fault_in.flights.wait(&guard, waiter(is_own(layer))?);
                        Queued::InFlight
                    }
                    _ => Queued::PageToRead(self.family.fault_in.depart(
                        layer,
                        slot,
                        guard,
                        vec![waiter(is_own(layer))?],
                    )),
                }),
            })
        })
    }
}

impl Ram {
    /// Fetches the next pages of a request from memory and devices. `read_end` is the reason why the
    /// first of them has to wait. The request continues when all have arrived.
    pub(super) fn fetch<'a>(&'a self, job: Job, read_end: ReadEnd<'a>) {
        let first = job.request.offset;
        let end = (first / PAGE + FETCH_PAGES) * PAGE;
        let end = end.min(first + job.request.len);
        let fetching = Fetching { job: Some(job), bytes: end - first, pending: 1, error: None };
        let fetch = Arc::new(Fetch { ram: self.clone(), state: Mutex::new(fetching) });
        let (mut wanted, on_base) = self.gather(&fetch, first..end, read_end);
        for read in on_base {
            read.submit(&fetch);
        }
        let fault_in = &self.0.family.fault_in;
        let next = end.div_ceil(PAGE);
        if fault_in.keeps_in_memory() && fault_in.readers.is_sequential(first / PAGE, next) {
            wanted.extend(self.start_read_ahead(next, AHEAD_PAGES));
        }
        fault_in.read(wanted);
        fetch.deliver(None, Ok(&[]));
    }

    /// Gathers a range for a read: copies pages in memory and queues on the others. Counts the
    /// pages to come as pending, and returns those that the caller must read.
    fn gather<'a>(
        &'a self,
        fetch: &Arc<Fetch>,
        range: Range<u64>,
        mut read_end: ReadEnd<'a>,
    ) -> (Vec<PageToRead>, Vec<BaseRead>) {
        let (mut wanted, mut on_base) = (Vec::new(), Vec::new());
        // Locked throughout: the first page may arrive before the last is queued.
        let mut fetching = fetch.state.lock();
        let Fetching { job: Some(job), pending, error, .. } = &mut *fetching else {
            return (wanted, on_base);
        };
        let start = job.at;
        let mut offset = range.start;
        while offset < range.end {
            let at = start + (offset - range.start) as usize;
            let left = range.end - offset;
            let (slot, from, len) = piece(offset, left);
            match std::mem::replace(&mut read_end, ReadEnd::Complete) {
                ReadEnd::Complete => {
                    let read = job.buffer.get_mut(at..at + left as usize).ok_or(Error::Misaligned);
                    match read.and_then(|into| self.0.read_some(offset, into)) {
                        Ok((read, stopped)) => {
                            offset += read as u64;
                            read_end = stopped;
                        }
                        Err(failed) => {
                            *error = error.or(Some(failed));
                            break;
                        }
                    }
                }
                ReadEnd::Base(base, bytes) => {
                    let len = bytes.min(left as usize);
                    on_base.push(BaseRead::new(base, slot, Piece { at, from, len }));
                    *pending += 1;
                    offset += len as u64;
                }
                ReadEnd::Staged(base, bytes) => {
                    let len = bytes.min(left as usize);
                    on_base.push(BaseRead::new(&base, slot, Piece { at, from, len }));
                    *pending += 1;
                    offset += len as u64;
                }
                ReadEnd::MustWait => {
                    let piece = Piece { at, from, len };
                    match self.0.queue(slot, |_| Some(Waiter::Page(Arc::clone(fetch), piece))) {
                        // The page has arrived meanwhile.
                        None => continue,
                        Some(Queued::InFlight) => {}
                        Some(Queued::PageToRead(page)) => wanted.push(page),
                        Some(Queued::Base(base)) => on_base.push(BaseRead::new(&base, slot, piece)),
                    }
                    *pending += 1;
                    offset += len as u64;
                }
            }
        }
        drop(fetching);
        (wanted, on_base)
    }

    /// Puts written-back pages from `first` on in flight without a waiter; none if memory is short.
    fn start_read_ahead(&self, first: u64, count: u64) -> Vec<PageToRead> {
        let (pages, fault_in) = (&self.0.pages, &self.0.family.fault_in);
        // Do not read ahead what would trigger an eviction.
        let room =
            pages.eviction_marks().map_or(u64::MAX, |(high, _)| high.saturating_sub(pages.pool.pages()));
        let end = (first + count.min(room)).min(self.0.slots());
        let wanted = |slot| {
            pin::pinned(|pin| {
                let layer = &self.0.view.load(pin).layer;
                let leaf = layer.table().leaf(slot).filter(|leaf| leaf.peek(slot).kind() == Kind::Spilled)?;
                let guard = leaf.lock(slot);
                let spilled = guard.word().kind() == Kind::Spilled;
                spilled.then(|| fault_in.depart(layer, slot, guard, Vec::new()))
            })
        };
        (first..end).filter_map(wanted).collect()
    }

    /// Reads pages into memory that will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, len: u64) {
        if self.0.family.fault_in.keeps_in_memory() && len > 0 {
            let first = offset / PAGE;
            let pages = (offset.saturating_add(len).div_ceil(PAGE) - first).min(FETCH_PAGES);
            self.0.family.fault_in.read(self.start_read_ahead(first, pages));
        }
    }
}

/// Neighbouring pages of a read on a base.
struct BaseRead {
    base: Base,
    /// Byte range of the pages on the base, clipped to its size.
    start: u64,
    len: u64,
    piece: Piece,
}

impl BaseRead {
    fn new(base: &Base, slot: u64, piece: Piece) -> Self {
        let start = slot * PAGE;
        let pages = (piece.from + piece.len).div_ceil(PAGE_BYTES) as u64;
        let len = (pages * PAGE).min(base.size.saturating_sub(start));
        Self { base: base.clone(), start, len, piece }
    }

    fn submit(self, fetch: &Arc<Fetch>) {
        let Self { base, start, len, piece } = self;
        match IoBuf::zeroed(len as usize) {
            Ok(buffer) => {
                let fetch = Arc::clone(fetch);
                let done = Completion::new(move |outcome: Result<()>, buffer: IoBuf| {
                    fetch.deliver(Some(piece), outcome.map(|()| &buffer[..]));
                });
                base.device.submit(Request::read(start, len), buffer, done);
            }
            Err(error) => fetch.deliver(Some(piece), Err(error)),
        }
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
