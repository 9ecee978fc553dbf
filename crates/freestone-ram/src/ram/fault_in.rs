//! Requests that wait for pages, and the reads from the backing device that serve them.
//!
//! # Life of a page in flight
//! * A read or a partial write finds a `Spilled` slot. The slot becomes `InFlight`, later requests
//!   for the page queue there, and the object is read from the device. No lock is held meanwhile.
//! * When the read completes, the slot *lands*. In the packed layout the object moves to the pool
//!   if memory allows, and its space on the device is freed. Otherwise the slot becomes `Spilled`
//!   again. In both cases the waiters get the content.
//! * If the read fails, times out or returns damaged content, the slot becomes `Spilled` again, and
//!   waiters for the content get an I/O error. Later requests read the device again.
//!
//! Overwriting or discarding a whole page needs no read: it replaces `Spilled`, and waits only if
//! the slot is in flight.
//!
//! A page of a base on a disk is read from there without any slot in flight, as the base does not
//! change.
//!
//! A page that was read moves back to memory because it is hot now: its space on the device is free
//! for a colder page, and the object needs no compression. In the plain layout the page stays on
//! the device, as in the kernel, whose statistics that layout reports.
//!
//! The pages of a request are requested together, neighbouring ones in one read, and the next pages
//! of a sequential reader along with them.

use std::sync::Arc;

use super::job::Job;
use super::layer::Layer;
use super::pages::Pages;
use super::stats::counter;
use super::waiter::{PageToRead, Readers, Waiter};
use super::{Ram, piece};
use crate::pool::BackRef;
use crate::spill::objects::{ReadGroup, Spilled};
use crate::spill::reads::{ReadError, TimedOutRead};
use crate::spill::store::Store;
use freestone_core::device::{Error, Result};
use freestone_core::log_limit::LogLimit;
use freestone_core::slot::{Flights, Landed, SlotGuard, Word};
use freestone_core::{PAGE_BYTES, pin};

/// The pages of a family that are in flight from the backing device.
pub(super) struct FaultIn {
    pages: Arc<Pages>,
    pub flights: Flights<Waiter>,
    pub readers: Readers,
    /// Rate limits of log lines; `None` for damaged pages.
    lines: LogLimit<Option<ReadError>>,
}

impl FaultIn {
    pub fn new(pages: Arc<Pages>) -> Self {
        Self { pages, flights: Flights::default(), readers: Readers::default(), lines: LogLimit::default() }
    }

    /// Reads pages in flight, neighbouring ones together.
    pub(super) fn read(self: &Arc<Self>, wanted: Vec<PageToRead>) {
        let Some(store) = &self.pages.store else { return };
        for ReadGroup { first, blocks, pages: together } in store.group_reads(wanted) {
            // Weak: a hanging device must not keep the family in memory.
            let fault_in = Arc::downgrade(self);
            store.read(first, blocks, move |outcome| {
                let Some(fault_in) = fault_in.upgrade() else { return };
                if matches!(outcome, Err(ReadError::Failed(_))) && together.len() > 1 {
                    // One bad page may have failed the whole read: retry each. This is a thread of
                    // the device, which must not be called from here.
                    let weak = Arc::downgrade(&fault_in);
                    return fault_in.pages.keeper.run(move || {
                        if let Some(fault_in) = weak.upgrade() {
                            fault_in.read_one_by_one(together);
                        }
                    });
                }
                for wanted in together {
                    fault_in.complete(&wanted, first, outcome);
                }
            });
        }
    }

    /// Reads each page in flight again. Includes pages only read ahead: a request may start to wait
    /// for one at any time, and must get only that page's error.
    fn read_one_by_one(self: &Arc<Self>, wanted: Vec<PageToRead>) {
        for wanted in wanted {
            if self.flights.owner(wanted.flight).is_some() {
                self.read(vec![wanted]);
            }
        }
    }

    /// Returns true if pages read from the device stay in memory.
    pub(super) fn keeps_in_memory(&self) -> bool {
        self.pages.store.as_ref().is_some_and(|store| store.is_packed())
    }

    pub(super) fn depart(
        &self,
        layer: &Layer,
        slot: u64,
        guard: SlotGuard<'_>,
        waiting: Vec<Waiter>,
    ) -> PageToRead {
        let spilled = Spilled { slot, word: guard.word(), header_owner: layer.header_owner(slot) };
        PageToRead { flight: self.flights.depart(guard, layer.owner(slot).bits(), waiting), spilled }
    }

    /// Handles the completion of the read that starts at block `first`.
    fn complete(&self, wanted: &PageToRead, first: u64, outcome: std::result::Result<&[u8], ReadError>) {
        let Some(store) = &self.pages.store else { return };
        // The flight may already have ended because its layer is gone.
        let Some(owner) = self.flights.owner(wanted.flight) else { return };
        let object = outcome.ok().and_then(|buffer| store.object(&wanted.spilled, first, buffer));
        let Some(object) = object else {
            self.log_failed_read(store, wanted.spilled.slot, outcome.err());
            self.land(owner, wanted.flight, None, Err(Error::Media));
            return;
        };
        let place = BackRef::from_bits(owner);
        // Only a request that changes this very slot: others read through it.
        let changes = |waiter: &Waiter| matches!(waiter, Waiter::Retry { ram, job, .. } if job.needs_content() && ram.layer_id() == place.table());
        if let Some(Waiter::Retry { ram, job, .. }) = self.flights.take_waiter(wanted.flight, changes) {
            return self.change(&ram, job, owner, wanted, object);
        }
        // In the kernel's layout the page stays on the device, as in the kernel.
        let back = if store.is_packed() { self.store_in_pool(owner, object, wanted) } else { None };
        self.land(owner, wanted.flight, back, Ok(object));
    }

    /// Logs a failed read of a page; `None` is damaged content.
    #[cold]
    fn log_failed_read(&self, store: &Store, slot: u64, error: Option<ReadError>) {
        if error == Some(ReadError::TimedOut) {
            // Timed-out reads are logged together.
            return store.failed_read();
        }
        let Some(held_back) = self.lines.line(error) else { return };
        let name = self.pages.name();
        if let Some(ReadError::Failed(error)) = error {
            tracing::warn!("{name}: page {slot} cannot be read from backing_dev: {error}{held_back}");
        } else {
            tracing::warn!("{name}: page {slot} came back damaged from backing_dev{held_back}");
        }
    }

    /// Changes part of a page that was read for this. Memory needs to hold one object only: that of
    /// the changed page.
    fn change(&self, ram: &Ram, job: Job, owner: u64, wanted: &PageToRead, object: &[u8]) {
        let mut page = [0; PAGE_BYTES];
        let unpacked = self.pages.unpack_spilled(wanted.spilled.word, object, &mut page);
        let (_, from, len) = piece(job.request.offset, job.request.len);
        job.part(len).put(from, &mut page);
        let stored =
            unpacked.and_then(|()| self.pages.store_page(&ram.0.layer(), wanted.spilled.slot, &page));
        let landed = match stored {
            Ok(word) => self.land_changed(ram, owner, wanted.flight, word, unpacked.map(|()| object)),
            Err(_) => self.land(owner, wanted.flight, None, unpacked.map(|()| object)).then_some(Ok(())),
        };
        match (stored, landed) {
            (Err(Error::NoSpace), _) => ram.wait_for_memory(job),
            (Err(error), _) | (Ok(_), Some(Err(error))) => ram.fail_write(job, error),
            // The page landed meanwhile, or a snapshot is being taken.
            (Ok(_), None) => self.pages.keeper.resume(ram.clone(), job),
            (Ok(_), Some(Ok(()))) => ram.done_with_page(job, len),
        }
    }

    /// Ends a flight with the changed page, which is stored in memory. The old object moves to the
    /// snapshot that needs it, and the waiters get the old content. `None`: the slot was not
    /// changed, and `changed` is freed.
    fn land_changed(
        &self,
        ram: &Ram,
        owner: u64,
        flight: u64,
        changed: Word,
        content: Result<&[u8]>,
    ) -> Option<Result<()>> {
        let place = BackRef::from_bits(owner);
        let landed = pin::pinned(|pin| {
            let view = ram.0.view.load(pin);
            // A rewind may have replaced the layer, or a snapshot may be in progress.
            let layer = Some(&view.layer).filter(|layer| layer.id() == place.table() && !view.is_frozen())?;
            let guard = layer.table().leaf(place.slot())?.lock(place.slot());
            if guard.word() != Word::in_flight(flight) {
                return None;
            }
            let held = self.flights.held(flight)?;
            let land = || self.flights.land(guard, |_| changed);
            Some(view.exchange(&*self.pages, place.slot(), held, changed, land))
        });
        match landed {
            Some(Ok(landed)) => {
                self.complete_waiters(landed, false, content);
                Some(Ok(()))
            }
            failed => {
                self.pages.release(changed);
                self.land(owner, flight, None, content);
                failed.map(|failed| failed.map(drop))
            }
        }
    }

    /// Stores an object read from the device in the pool; `None` if memory is short.
    fn store_in_pool(&self, owner: u64, object: &[u8], wanted: &PageToRead) -> Option<Word> {
        let owner = BackRef::from_bits(owner);
        let layer = self.pages.layers.get(owner.table())?;
        let room = layer.has_room(object.len());
        let location = room
            .then(|| {
                self.pages.pool.store(object, owner, self.pages.layers.pages_reserved_for_others(&layer)).ok()
            })
            .flatten();
        if location.is_none() {
            self.pages.keeper.kick();
        }
        location.map(|location| wanted.spilled.word.back_at(location))
    }

    /// Ends a flight and gives the content or error to the waiters. `back` is the page's word if it
    /// is in memory again. Returns false if the flight had already ended.
    fn land(&self, owner: u64, flight: u64, back: Option<Word>, content: Result<&[u8]>) -> bool {
        let landed = self.pages.with_owner_slot(BackRef::from_bits(owner), |layer, guard| {
            if guard.word() != Word::in_flight(flight) {
                return None;
            }
            let now = self.pages.ages.now();
            let landed = self.flights.land(guard, |held| match back {
                Some(word) => word.with_age(now),
                None => held.touched(now),
            });
            if let Some(back) = back {
                layer.account_faulted_in(&self.pages.layers, back);
            }
            Some(landed)
        });
        let Some(landed) = landed.flatten() else {
            if let Some(back) = back {
                self.pages.release(back);
            }
            return false;
        };
        if back.is_some() {
            self.pages.release(landed.held);
        }
        self.complete_waiters(landed, back.is_none(), content);
        true
    }

    /// Gives the content of a landed page, or the error, to its waiters. `still_spilled`: a partial
    /// write must wait for memory.
    fn complete_waiters(&self, landed: Landed<Waiter>, still_spilled: bool, content: Result<&[u8]>) {
        let Landed { held, waiting } = landed;
        if waiting.is_empty() {
            return;
        }
        let mut page = [0; PAGE_BYTES];
        let outcome = content.and_then(|object| self.pages.unpack_spilled(held, object, &mut page));
        for waiter in waiting {
            match waiter {
                Waiter::Page(fetch, piece) => {
                    if outcome.is_err() {
                        fetch.ram.0.counters.add(counter::FAILED_READS, 1);
                    }
                    fetch.deliver(Some(piece), outcome.map(|()| &page[..]));
                }
                Waiter::Retry { ram, job, is_own } => match outcome {
                    Err(error) if job.needs_content() => ram.fail_write(job, error),
                    // The parent's content stays valid whatever happened to the device meanwhile.
                    Ok(()) if job.needs_content() && !is_own => ram.put_over_parent(job, &mut page.clone()),
                    Ok(()) if job.needs_content() && still_spilled => ram.wait_for_memory(job),
                    _ => self.pages.keeper.resume(ram, job),
                },
            }
        }
    }

    /// Fails reads that timed out.
    pub(super) fn fail_late_reads(&self) {
        let Some(store) = &self.pages.store else { return };
        let late = store.late_reads();
        if !late.is_empty() {
            let (reads, ms) = (late.len(), store.timeout_ms());
            if let Some(held_back) = self.lines.line(Some(ReadError::TimedOut)) {
                let name = self.pages.name();
                tracing::warn!(
                    "{name}: {reads} reads of backing_dev fail: it has answered nothing for {ms} ms, or has lost \
                     them{held_back}"
                );
            }
            self.pages.keeper.run(move || late.into_iter().for_each(TimedOutRead::fail));
        }
    }
}
