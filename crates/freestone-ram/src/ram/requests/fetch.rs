//! Reads that must wait: gathers the pages of a read from memory, the backing device and a base on
//! another device. The read completes when all pages have arrived.
//!
//! The pages of a request are read together, neighbouring pages with one request to the device. For
//! a sequential reader the next pages are read too.

use std::ops::Range;
use std::sync::Arc;

use crate::ram::device::chain::View;
use crate::ram::device::flights::{Fetch, Fetching, PageToRead, Piece, Waiter};
use crate::ram::device::parent::{Base, Parent, ReadEnd};
use crate::ram::device::{Inner, Ram};
use crate::ram::geometry::{PAGE, piece};
use crate::ram::memory::layer::Layer;
use crate::ram::waiting::job::Job;
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::pin::Pin;
use freestone_core::slot::{Kind, SlotGuard};
use freestone_core::sync::Mutex;
use freestone_core::{PAGE_BYTES, pin};

/// Maximum pages of a read that are fetched at once.
const FETCH_PAGES: u64 = 256;
/// Number of pages that are read ahead for a sequential reader.
const AHEAD_PAGES: u64 = 64;

/// Location of a slot's page, for a request that must wait.
pub(super) enum Place<'a> {
    /// The page is in memory, or a hole.
    Resident,
    /// The page is on the backing device or in flight from there; this locked slot of the layer
    /// refers to it.
    Slot(&'a Layer, SlotGuard<'a>),
    Base(&'a Base),
}

/// Calls `then` with the location of the page that a slot shows: in the device, its chain or its
/// parent.
pub(super) fn locate<R>(view: &View, pin: &Pin<'_>, slot: u64, then: impl FnOnce(Place<'_>) -> R) -> R {
    view.with_page(pin, slot, |found| match found {
        Some((layer, guard)) if matches!(guard.word().kind(), Kind::InFlight | Kind::Spilled) => {
            then(Place::Slot(layer, guard))
        }
        Some(_) => then(Place::Resident),
        None => locate_below(&view.parent, pin, slot, then),
    })
}

/// As [`locate`], for a page that is read from `parent`.
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
            // Box the closure: otherwise each level of recursion would instantiate the function for
            // another closure type.
            let then: Box<dyn FnOnce(Place<'_>) -> R + '_> = Box::new(then);
            locate(ram.0.view.load(pin), pin, slot, then)
        }
    }
}

/// Action that the caller of [`Inner::queue`] must take for a request that waits for a page.
pub(super) enum QueueOutcome {
    /// Nothing: the request is queued, and the page is already in flight.
    InFlight,
    /// Read the page from the backing device; the request is queued.
    PageToRead(PageToRead),
    /// Read the page from the base; the request is not queued.
    Base(Base),
}

impl Inner {
    /// Queues a waiter on a page that is not in memory. `waiter` receives true if the page is in
    /// the device's own slot. Returns `None` if the page is in memory or a hole.
    pub(super) fn queue(
        &self,
        slot: u64,
        waiter: impl FnOnce(bool) -> Option<Waiter>,
    ) -> Option<QueueOutcome> {
        pin::pinned(|pin| {
            let view = self.view.load(pin);
            let is_own = |layer: &Layer| std::ptr::eq(layer, &raw const *view.layer);
            locate(view, pin, slot, |place| match place {
                Place::Resident => None,
                Place::Base(base) => Some(QueueOutcome::Base(base.clone())),
                Place::Slot(layer, guard) if guard.word().kind() == Kind::InFlight => {
                    self.family.fault_in.flights.wait(&guard, waiter(is_own(layer))?);
                    Some(QueueOutcome::InFlight)
                }
                Place::Slot(layer, guard) => {
                    let guard = self.pages.enter_group(layer, guard).err()?;
                    let waiting = vec![waiter(is_own(layer))?];
                    let wanted = self.family.fault_in.depart(layer, slot, guard, waiting);
                    Some(QueueOutcome::PageToRead(wanted))
                }
            })
        })
    }
}

impl Ram {
    /// Fetches the next pages of a read from memory and devices. `read_end` is the reason why the
    /// first page must wait. The request continues when all of them have arrived.
    pub(in crate::ram) fn fetch<'a>(&'a self, job: Job, read_end: ReadEnd<'a>) {
        freestone_core::trail::step!();
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

    /// Gathers a byte range for a read: copies pages that are in memory, and queues the read on the
    /// others. Counts the latter as pending. Returns the pages that the caller must read, from the
    /// backing device and from bases.
    fn gather<'a>(
        &'a self,
        fetch: &Arc<Fetch>,
        range: Range<u64>,
        mut read_end: ReadEnd<'a>,
    ) -> (Vec<PageToRead>, Vec<BaseRead>) {
        let (mut wanted, mut on_base) = (Vec::new(), Vec::new());
        // Keep the lock throughout: the first page may arrive before the last page is counted.
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
                        Some(QueueOutcome::InFlight) => {}
                        Some(QueueOutcome::PageToRead(page)) => wanted.push(page),
                        Some(QueueOutcome::Base(base)) => on_base.push(BaseRead::new(&base, slot, piece)),
                    }
                    *pending += 1;
                    offset += len as u64;
                }
            }
        }
        drop(fetching);
        (wanted, on_base)
    }

    /// Puts written-back pages among the `count` pages from `first` on in flight, without waiters.
    /// Returns these pages, which the caller must read; fewer or none if memory is short.
    fn start_read_ahead(&self, first: u64, count: u64) -> Vec<PageToRead> {
        let (pages, fault_in) = (&self.0.pages, &self.0.family.fault_in);
        // Do not read more pages ahead than fit without an eviction.
        let space =
            pages.eviction_marks().map_or(u64::MAX, |(high, _)| high.saturating_sub(pages.pool.pages()));
        let end = (first + count.min(space)).min(self.0.slots());
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

    /// Reads written-back pages of a byte range into memory, as they will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, len: u64) {
        if self.0.family.fault_in.keeps_in_memory() && len > 0 {
            let first = offset / PAGE;
            let pages = (offset.saturating_add(len).div_ceil(PAGE) - first).min(FETCH_PAGES);
            self.0.family.fault_in.read(self.start_read_ahead(first, pages));
        }
    }
}

/// A read of neighbouring pages from a base, as part of a [`Fetch`].
struct BaseRead {
    base: Base,
    /// Byte range of the pages on the base, clipped to the base's size.
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
