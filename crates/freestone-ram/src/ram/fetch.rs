//! Reads that cannot be done at once: their pages are gathered from the backing device, from a base
//! that has to wait for a disk, and from memory; the request goes on when all are there.
//!
//! Pages that one request needs are asked for together, those that lie near each other in one read.
//! A sequential reader's next pages are asked for along with them.

use std::ops::Range;
use std::sync::Arc;

use super::chain::View;
use super::job::Job;
use super::layer::Layer;
use super::parent::{Base, Look, Parent};
use super::waiter::{Fetch, Fetching, Piece, Waiter, Wanted};
use super::{Inner, PAGE, Ram, piece};
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::pin::Pin;
use freestone_core::slot::{Kind, SlotGuard};
use freestone_core::sync::Mutex;
use freestone_core::{PAGE_BYTES, pin};

/// Pages that a read asks for at once.
const FETCH_PAGES: u64 = 256;
/// Pages that are read ahead of a sequential reader.
const AHEAD_PAGES: u64 = 64;

/// Where the page of a slot is for a request that could not get it at once.
pub(super) enum Place<'a> {
    /// In memory, or nowhere.
    Here,
    /// In this slot: spilled, or in flight.
    Slot(&'a Layer, SlotGuard<'a>),
    /// On a base.
    Base(&'a Base),
}

/// Has `then` look at where the page of a slot is.
pub(super) fn locate<R>(view: &View, pin: &Pin<'_>, slot: u64, then: impl FnOnce(Place<'_>) -> R) -> R {
    view.with_page(pin, slot, |found| match found {
        Some((layer, guard)) if matches!(guard.word().kind(), Kind::InFlight | Kind::Spilled) => {
            then(Place::Slot(layer, guard))
        }
        Some(_) => then(Place::Here),
        None => locate_below(&view.parent, pin, slot, then),
    })
}

/// The same, of a page that lies below.
fn locate_below<R>(parent: &Parent, pin: &Pin<'_>, slot: u64, then: impl FnOnce(Place<'_>) -> R) -> R {
    match parent {
        Parent::Staged(staged) => match staged.left(pin).filter(|here| here.has(slot)) {
            Some(here) => then(Place::Base(&here.base)),
            None => locate_below(&staged.below, pin, slot, then),
        },
        _ if !parent.reaches(slot) => then(Place::Here),
        Parent::Nothing => then(Place::Here),
        Parent::Device(base) => then(Place::Base(base)),
        Parent::Snapshot(ram) => {
            // Not one function of itself for each level.
            let then: Box<dyn FnOnce(Place<'_>) -> R + '_> = Box::new(then);
            locate(ram.0.view.load(pin), pin, slot, then)
        }
    }
}

/// What a request that queues on a page has to do beside that.
pub(super) enum Queued {
    /// Nothing: it is on its way already.
    Waits,
    /// Read it from the backing device.
    Wanted(Wanted),
    /// Read it from the base; it is not queued.
    Base(Base),
}

impl Inner {
    /// Queues a waiter on a page. `None`: there is nothing to wait for any more.
    pub(super) fn queue(&self, slot: u64, waiter: impl FnOnce(bool) -> Option<Waiter>) -> Option<Queued> {
        pin::pinned(|pin| {
            let view = self.view.load(pin);
            let is_own = |layer: &Layer| std::ptr::eq(layer, &raw const *view.layer);
            locate(view, pin, slot, |place| match place {
                Place::Here => None,
                Place::Base(base) => Some(Queued::Base(base.clone())),
                Place::Slot(layer, guard) => Some(match guard.word().kind() {
                    Kind::InFlight => {
                        self.family.fault_in.flights.wait(&guard, waiter(is_own(layer))?);
                        Queued::Waits
                    }
                    _ => Queued::Wanted(self.family.fault_in.depart(
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
    /// Reads the next pages of a request, from memory or from a device; at the first of them `look`
    /// found that it has to wait. The request goes on when all are there.
    pub(super) fn fetch<'a>(&'a self, job: Job, look: Look<'a>) {
        let first = job.request.offset;
        let end = (first / PAGE + FETCH_PAGES) * PAGE;
        let end = end.min(first + job.request.len);
        let fetching = Fetching { job: Some(job), bytes: end - first, pending: 1, error: None };
        let fetch = Arc::new(Fetch { ram: self.clone(), state: Mutex::new(fetching) });
        let (mut wanted, on_base) = self.gather(&fetch, first..end, look);
        for read in on_base {
            read.submit(&fetch);
        }
        let fault_in = &self.0.family.fault_in;
        let next = end.div_ceil(PAGE);
        if fault_in.comes_back() && fault_in.readers.is_sequential(first / PAGE, next) {
            wanted.extend(self.ahead(next, AHEAD_PAGES));
        }
        fault_in.read(wanted);
        fetch.deliver(None, Ok(&[]));
    }

    /// Gets a range for a read: what is in memory now, other pages by queueing on them. What comes
    /// from elsewhere is counted as pending; what of it the caller has to read is returned.
    fn gather<'a>(
        &'a self,
        fetch: &Arc<Fetch>,
        range: Range<u64>,
        mut look: Look<'a>,
    ) -> (Vec<Wanted>, Vec<BaseRead>) {
        let (mut wanted, mut on_base) = (Vec::new(), Vec::new());
        // Held over all of it: what was queued on first may come before the last is looked at.
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
            match std::mem::replace(&mut look, Look::All) {
                Look::All => {
                    let read = job.buffer.get_mut(at..at + left as usize).ok_or(Error::Misaligned);
                    match read.and_then(|into| self.0.read_some(offset, into)) {
                        Ok((read, stopped)) => {
                            offset += read as u64;
                            look = stopped;
                        }
                        Err(failed) => {
                            *error = error.or(Some(failed));
                            break;
                        }
                    }
                }
                Look::Base(base, bytes) => {
                    let len = bytes.min(left as usize);
                    on_base.push(BaseRead::new(base, slot, Piece { at, from, len }));
                    *pending += 1;
                    offset += len as u64;
                }
                Look::Staged(base, bytes) => {
                    let len = bytes.min(left as usize);
                    on_base.push(BaseRead::new(&base, slot, Piece { at, from, len }));
                    *pending += 1;
                    offset += len as u64;
                }
                Look::Waits => {
                    let piece = Piece { at, from, len };
                    match self.0.queue(slot, |_| Some(Waiter::Page(Arc::clone(fetch), piece))) {
                        // It has come meanwhile.
                        None => continue,
                        Some(Queued::Waits) => {}
                        Some(Queued::Wanted(page)) => wanted.push(page),
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

    /// The pages from `first` on that are spilled, put in flight with nobody waiting; none where
    /// memory is short.
    fn ahead(&self, first: u64, count: u64) -> Vec<Wanted> {
        let (pages, fault_in) = (&self.0.pages, &self.0.family.fault_in);
        // Not what would push out others at once.
        let room = pages.marks().map_or(u64::MAX, |(high, _)| high.saturating_sub(pages.pool.pages()));
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

    /// Has pages in memory that will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, len: u64) {
        if self.0.family.fault_in.comes_back() && len > 0 {
            let first = offset / PAGE;
            let pages = (offset.saturating_add(len).div_ceil(PAGE) - first).min(FETCH_PAGES);
            self.0.family.fault_in.read(self.ahead(first, pages));
        }
    }
}

/// Neighbouring pages of a read that come from a base.
struct BaseRead {
    base: Base,
    /// Whole pages, as far as the base goes: where they begin, and how many bytes they have.
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
