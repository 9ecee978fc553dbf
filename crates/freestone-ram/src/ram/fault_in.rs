//! Requests that cannot be done at once, and pages that come from the backing device for them.
//!
//! # The way of a page
//! * A read, or a write to a part of the page, meets a `Spilled` slot: the slot becomes `InFlight`,
//!   whoever needs the page meanwhile queues there, and the object is read from the device. No lock
//!   is held across that.
//! * When it has come the slot *lands*. In the packed layout the object goes to the pool, as it is,
//!   if memory allows: the page has come back, and its place on the device is free. Else the slot
//!   becomes `Spilled` as before. Either way those that waited get the content.
//! * A read that fails, is damaged, or is not answered in time lands the slot as it was, and is an
//!   I/O error for those who waited for the content. Later requests ask the device again.
//!
//! A whole page that is overwritten or discarded needs no read: it replaces `Spilled`, and waits
//! only for a flight.
//!
//! A page that falls through to a base which would have to wait for a disk is read from there: no
//! slot waits for it, as the base does not change.
//!
//! Pages that one request needs are asked for together, those that lie near each other on the
//! device in one read. A sequential reader's next pages are asked for along with them.

use std::sync::Arc;

use super::job::Job;
use super::layer::Layer;
use super::pages::Pages;
use super::stats::counter;
use super::waiter::{Readers, Waiter, Wanted};
use super::{Ram, piece};
use crate::pool::BackRef;
use crate::spill::objects::{Near, Spilled};
use crate::spill::reads::{Late, ReadError};
use crate::spill::store::Store;
use freestone_core::device::{Error, Result};
use freestone_core::log_limit::LogLimit;
use freestone_core::slot::{Flights, Landed, SlotGuard, Word};
use freestone_core::{PAGE_BYTES, pin};

/// The pages of a family that are on their way from the backing device.
pub(super) struct FaultIn {
    pages: Arc<Pages>,
    pub flights: Flights<Waiter>,
    pub readers: Readers,
    /// `None` is of pages that came back damaged.
    lines: LogLimit<Option<ReadError>>,
}

impl FaultIn {
    /// Nothing is on its way.
    pub fn new(pages: Arc<Pages>) -> Self {
        Self { pages, flights: Flights::default(), readers: Readers::default(), lines: LogLimit::default() }
    }

    /// Reads pages that are in flight, near ones together.
    pub(super) fn read(self: &Arc<Self>, wanted: Vec<Wanted>) {
        let Some(store) = &self.pages.store else { return };
        for Near { first, blocks, of: together } in store.near_ones_together(wanted) {
            // Weak: a device that never answers keeps no family in memory.
            let fault_in = Arc::downgrade(self);
            store.read(first, blocks, move |outcome| {
                let Some(fault_in) = fault_in.upgrade() else { return };
                if matches!(outcome, Err(ReadError::Failed(_))) && together.len() > 1 {
                    // One of them may be to blame. This is a thread of the device, which must not
                    // be asked from here.
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

    /// Reads pages in flight again, each for itself. Also those that were only read ahead: somebody
    /// may come to wait for one at any moment, and is told of its own error only.
    fn read_one_by_one(self: &Arc<Self>, wanted: Vec<Wanted>) {
        for wanted in wanted {
            if self.flights.owner(wanted.flight).is_some() {
                self.read(vec![wanted]);
            }
        }
    }

    /// Whether pages that were read stay in memory.
    pub(super) fn comes_back(&self) -> bool {
        self.pages.store.as_ref().is_some_and(|store| store.is_packed())
    }

    pub(super) fn depart(
        &self,
        layer: &Layer,
        slot: u64,
        guard: SlotGuard<'_>,
        waiting: Vec<Waiter>,
    ) -> Wanted {
        let spilled = Spilled { slot, word: guard.word(), header_owner: layer.header_owner(slot) };
        Wanted { flight: self.flights.depart(guard, layer.owner(slot).bits(), waiting), spilled }
    }

    /// What was read from block `first` on has come, or failed.
    fn complete(&self, wanted: &Wanted, first: u64, outcome: std::result::Result<&[u8], ReadError>) {
        let Some(store) = &self.pages.store else { return };
        // Else it landed by other hands: its layer is gone.
        let Some(owner) = self.flights.owner(wanted.flight) else { return };
        let object = outcome.ok().and_then(|buffer| store.object(&wanted.spilled, first, buffer));
        let Some(object) = object else {
            self.tell_failed(store, wanted.spilled.slot, outcome.err());
            self.land(owner, wanted.flight, None, Err(Error::Media));
            return;
        };
        let place = BackRef::from_bits(owner);
        // Only who changes this very slot: others read through it.
        let changes = |waiter: &Waiter| matches!(waiter, Waiter::Retry { ram, job, .. } if job.needs_content() && ram.layer_id() == place.table());
        if let Some(Waiter::Retry { ram, job, .. }) = self.flights.take_waiter(wanted.flight, changes) {
            return self.change(&ram, job, owner, wanted, object);
        }
        // In the kernel's layout it stays there, as it does in the kernel.
        let back = if store.is_packed() { self.take_back(owner, object, wanted) } else { None };
        self.land(owner, wanted.flight, back, Ok(object));
    }

    /// Logs that a page could not be read, `None`: what came back is damaged.
    #[cold]
    fn tell_failed(&self, store: &Store, slot: u64, error: Option<ReadError>) {
        if error == Some(ReadError::Late) {
            // Those are told of together.
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

    /// Changes a part of a page that came from the device for that: what goes to memory is the
    /// changed page, so memory for one object is enough.
    fn change(&self, ram: &Ram, job: Job, owner: u64, wanted: &Wanted, object: &[u8]) {
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
            // The page landed by other hands meanwhile, or must not be changed at this moment.
            (Ok(_), None) => self.pages.keeper.resume(ram.clone(), job),
            (Ok(_), Some(Ok(()))) => ram.done_with_page(job, len),
        }
    }

    /// Ends a flight with the changed page, which is stored in memory; what the slot held goes to
    /// the snapshot that needs it. Those that waited get the former content. `None`: it was not
    /// changed; `changed` is freed then.
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
            // A rewind may have put another layer in place; a snapshot may be beginning.
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
                self.answer(landed, false, content);
                Some(Ok(()))
            }
            failed => {
                self.pages.release(changed);
                self.land(owner, flight, None, content);
                failed.map(|failed| failed.map(drop))
            }
        }
    }

    /// Stores an object that came from the device; `None` where memory is short.
    fn take_back(&self, owner: u64, object: &[u8], wanted: &Wanted) -> Option<Word> {
        let owner = BackRef::from_bits(owner);
        let layer = self.pages.layers.get(owner.table())?;
        let room = layer.has_room(object.len());
        let location = room
            .then(|| self.pages.pool.store(object, owner, self.pages.layers.kept_from(&layer)).ok())
            .flatten();
        if location.is_none() {
            self.pages.keeper.kick();
        }
        location.map(|location| wanted.spilled.word.back_at(location))
    }

    /// Ends a flight: `back` is where the page is in memory now, if it came back. Those that waited
    /// get the content, or the error. False: it had ended.
    fn land(&self, owner: u64, flight: u64, back: Option<Word>, content: Result<&[u8]>) -> bool {
        let landed = self.pages.at(BackRef::from_bits(owner), |layer, guard| {
            if guard.word() != Word::in_flight(flight) {
                return None;
            }
            let now = self.pages.ages.now();
            let landed = self.flights.land(guard, |held| match back {
                Some(word) => word.with_age(now),
                None => held.touched(now),
            });
            if let Some(back) = back {
                layer.account_back(&self.pages.layers, back);
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
        self.answer(landed, back.is_none(), content);
        true
    }

    /// Gives the content of a page that has landed, or the error, to those that waited for it.
    /// `still_spilled`: who would change a part of it has to wait for memory.
    fn answer(&self, landed: Landed<Waiter>, still_spilled: bool, content: Result<&[u8]>) {
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
                    // What lies below stays as it is, whatever became of the device meanwhile.
                    Ok(()) if job.needs_content() && !is_own => ram.put_over(job, &mut page.clone()),
                    Ok(()) if job.needs_content() && still_spilled => ram.wait_for_memory(job),
                    _ => self.pages.keeper.resume(ram, job),
                },
            }
        }
    }

    /// Has reads failed for which the device has taken too long.
    pub(super) fn hand_over_late_reads(&self) {
        let Some(store) = &self.pages.store else { return };
        let late = store.late_reads();
        if !late.is_empty() {
            let (reads, ms) = (late.len(), store.timeout_ms());
            if let Some(held_back) = self.lines.line(Some(ReadError::Late)) {
                let name = self.pages.name();
                tracing::warn!(
                    "{name}: {reads} reads of backing_dev fail: it has answered nothing for {ms} ms, or has lost \
                     them{held_back}"
                );
            }
            self.pages.keeper.run(move || late.into_iter().for_each(Late::give_up));
        }
    }
}
