//! Reads that cannot be done at once: their pages are gathered from the backing device, from a base that has to wait for a
//! disk, and from memory; the request goes on when all are there.
//!
//! Pages that one request needs are asked for together, those that lie near each other in one read. A sequential reader's
//! next pages are asked for along with them.

use std::sync::Arc;

use super::chain::View;
use super::job::Job;
use super::layer::Layer;
use super::parent::{Base, Parent};
use super::waiter::{Fetch, Fetching, Piece, Waiter, Wanted};
use super::{Inner, PAGE, Ram, piece};
use freestone_core::device::{Buffer, Completion, IoBuf, Request, Result, Tried};
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
    view.with_page(pin, slot, |found| match (found, &view.parent) {
        (Some((layer, guard)), _) if matches!(guard.word().kind(), Kind::InFlight | Kind::Spilled) => {
            then(Place::Slot(layer, guard))
        }
        (None, Parent::Device(base)) if view.parent.reaches(slot) => then(Place::Base(base)),
        (None, Parent::Snapshot(ram)) if view.parent.reaches(slot) => {
            // Not one function of itself for each level.
            let then: Box<dyn FnOnce(Place<'_>) -> R + '_> = Box::new(then);
            locate(ram.0.view.load(pin), pin, slot, then)
        }
        _ => then(Place::Here),
    })
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
                        self.family.flights.wait(&guard, waiter(is_own(layer))?);
                        Queued::Waits
                    }
                    _ => Queued::Wanted(self.family.depart(layer, slot, guard, vec![waiter(is_own(layer))?])),
                }),
            })
        })
    }
}

impl Ram {
    /// Reads the next pages of a request, from memory or from a device. The request goes on when all are there.
    pub(super) fn fetch(&self, job: Job) {
        let first = job.request.offset;
        let end = (first / PAGE + FETCH_PAGES) * PAGE;
        let end = end.min(first + job.request.len);
        let at = job.at;
        let fetching = Fetching { job: Some(job), bytes: end - first, pending: 1, error: None };
        let fetch = Arc::new(Fetch { ram: self.clone(), state: Mutex::new(fetching) });
        let mut wanted = Vec::new();
        let mut parent = BaseRun::default();
        let mut offset = first;
        while offset < end {
            let (slot, from, len) = piece(offset, end - offset);
            let piece = Piece { at: at + (offset - first) as usize, from, len };
            match self.gather(&fetch, slot, piece) {
                Some(Queued::Wanted(page)) => wanted.push(page),
                Some(Queued::Base(base)) => parent.add(&fetch, &base, slot, piece),
                Some(Queued::Waits) | None => {}
            }
            offset += len as u64;
        }
        parent.submit(&fetch);
        let family = &self.0.family;
        let next = end.div_ceil(PAGE);
        if family.comes_back() && family.readers.is_sequential(first / PAGE, next) {
            wanted.extend(self.ahead(next, AHEAD_PAGES));
        }
        family.read(wanted);
        fetch.deliver(None, Ok(None));
    }

    /// Gets one page for a read: now, or by queueing on it. What comes from a base is counted as pending.
    fn gather(&self, fetch: &Arc<Fetch>, slot: u64, piece: Piece) -> Option<Queued> {
        loop {
            let mut fetching = fetch.state.lock();
            let Fetching { job: Some(job), error, .. } = &mut *fetching else { return None };
            let into = job.buffer.get_mut(piece.at..piece.at + piece.len)?;
            let request = Request::read(slot * PAGE + piece.from as u64, piece.len as u64);
            let waits = match self.0.try_io(&request, Buffer::Read(into)) {
                // A base may give a part of it.
                Ok(tried) => tried != Tried::Done,
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
            match self.0.queue(slot, |_| Some(Waiter::Page(Arc::clone(fetch), piece))) {
                None => fetch.state.lock().pending -= 1, // It has come meanwhile.
                queued => return queued,
            }
        }
    }

    /// The pages from `first` on that are spilled, put in flight with nobody waiting; none where memory is short.
    fn ahead(&self, first: u64, pages: u64) -> Vec<Wanted> {
        let family = &self.0.family;
        // Not what would push out others at once.
        let room = family.marks().map_or(u64::MAX, |(high, _)| high.saturating_sub(family.pool.pages()));
        let end = (first + pages.min(room)).min(self.0.slots());
        let wanted = |slot| {
            pin::pinned(|pin| {
                let layer = &self.0.view.load(pin).layer;
                let leaf = layer.table().leaf(slot).filter(|leaf| leaf.peek(slot).kind() == Kind::Spilled)?;
                let guard = leaf.lock(slot);
                let spilled = guard.word().kind() == Kind::Spilled;
                spilled.then(|| family.depart(layer, slot, guard, Vec::new()))
            })
        };
        (first..end).filter_map(wanted).collect()
    }

    /// Has pages in memory that will be read soon.
    pub(super) fn read_ahead(&self, offset: u64, len: u64) {
        if self.0.family.comes_back() && len > 0 {
            let first = offset / PAGE;
            let pages = (offset.saturating_add(len).div_ceil(PAGE) - first).min(FETCH_PAGES);
            self.0.family.read(self.ahead(first, pages));
        }
    }
}

/// Neighbouring pages of a read that come from the base.
#[derive(Default)]
struct BaseRun {
    base: Option<Base>,
    first: u64,
    pieces: Vec<Piece>,
}

impl BaseRun {
    fn add(&mut self, fetch: &Arc<Fetch>, base: &Base, slot: u64, piece: Piece) {
        let joins = self.base.as_ref().is_some_and(|known| {
            Arc::ptr_eq(&known.device, &base.device) && self.first + self.pieces.len() as u64 == slot
        });
        if !joins {
            self.submit(fetch);
            (self.base, self.first) = (Some(base.clone()), slot);
        }
        self.pieces.push(piece);
    }

    fn submit(&mut self, fetch: &Arc<Fetch>) {
        let Some(base) = self.base.take() else { return };
        let (first, pieces) = (self.first, std::mem::take(&mut self.pieces));
        let len = (pieces.len() as u64 * PAGE).min(base.size - first * PAGE);
        let fetch = Arc::clone(fetch);
        let deliver = move |outcome: Result<()>, buffer: &[u8]| {
            let mut pages = buffer.chunks(PAGE_BYTES);
            for piece in pieces {
                let mut page = [0; PAGE_BYTES];
                let read = pages.next().unwrap_or_default();
                page[..read.len()].copy_from_slice(read);
                fetch.deliver(Some(piece), outcome.map(|()| Some(&page)));
            }
        };
        match IoBuf::zeroed(len as usize) {
            Ok(buffer) => {
                let done = Completion::new(move |outcome, buffer: IoBuf| deliver(outcome, &buffer));
                base.device.submit(Request::read(first * PAGE, len), buffer, done);
            }
            Err(error) => deliver(Err(error), &[]),
        }
    }
}
