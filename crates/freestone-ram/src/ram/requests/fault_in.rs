//! Requests that wait for pages, and the reads from the backing device that load these pages.
//!
//! # Life of a page in flight
//! * A read or a partial write finds a `Spilled` slot. The slot becomes `InFlight`, and the object
//!   is read from the device. Later requests for the page are queued on the flight. No lock is held
//!   meanwhile.
//! * When the read completes, the flight ends (the slot *lands*). In the packed layout the object
//!   is stored in the pool if memory allows. Otherwise the slot becomes `Spilled` again. In both
//!   cases the waiters receive the content.
//! * If the read fails, times out or returns damaged content, the slot becomes `Spilled` again.
//!   Requests that wait for the content fail with an I/O error. Later requests read the device
//!   again.
//!
//! Overwriting or discarding a whole page needs no read: the new word replaces the `Spilled` one.
//! Such requests wait only if the slot is in flight.
//!
//! A page of a fork's base on another device is read without any slot in flight, as the base does
//! not change.
//!
//! A page that was read moves back to memory because it is hot now, and the object needs no
//! compression. The object on the device stays as a [clean copy](freestone_spill::clean_copies) while
//! blocks are free. In the plain layout the page itself stays on the device, as in the kernel: the
//! plain layout reports the kernel's statistics.
//!
//! The pages of a request are read together, neighbouring pages with one request to the device. For
//! a sequential reader the next pages are read too.
//!
//! # Pages in groups
//! A read of a page in a spilled [group](crate::ram::memory::groups) reads the group's object. If
//! memory allows, the group is in memory again, and the neighbours of the page that are on the device
//! move to memory with it. Otherwise only the waiters receive the page. A page of a group that has
//! lost half of its pages is stored alone. While a page is in flight, it remains a user of its group
//! on the device, so the object exists. Reclaim may move the object; then it is read again.

use std::sync::Arc;

use crate::codec::{GROUP_PAGES, Page};
use crate::pool::BackRef;
use crate::ram::device::Ram;
use crate::ram::device::flights::{FaultIn, PageToRead, Waiter};
use crate::ram::device::stats::counter;
use crate::ram::geometry::piece;
use crate::ram::memory::groups;
use crate::ram::memory::layer::Layer;
use crate::ram::waiting::job::Job;
use freestone_core::device::{Error, Result};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::slot::{FlightId, FlightResult, SlotGuard, Word};
use freestone_core::{PAGE_BYTES, pin};
use freestone_spill::clean_copies::CopyContent;
use freestone_spill::objects::{ReadGroup, Spilled};
use freestone_spill::reads::{ReadError, TimedOutRead};
use freestone_spill::store::Store;

/// Content that was read for a page in flight.
#[derive(Clone, Copy)]
enum Content<'c> {
    /// The page's object.
    Object(&'c [u8]),
    /// The object of the page's group, and the page's word.
    Group(&'c [u8], Word),
    Page(&'c Page),
}

impl FaultIn {
    /// Reads the pages of these flights from the backing device, neighbouring ones in one request.
    pub(in crate::ram) fn read(self: &Arc<Self>, wanted: Vec<PageToRead>) {
        let Some(store) = &self.pages.store else { return };
        for ReadGroup { first, blocks, pages: together } in store.group_reads(wanted) {
            // Weak: a hanging device must not keep the family in memory.
            let fault_in = Arc::downgrade(self);
            store.read(first, blocks, move |outcome| {
                let Some(fault_in) = fault_in.upgrade() else { return };
                if matches!(outcome, Err(ReadError::Failed(_))) && together.len() > 1 {
                    // A single bad page may have failed the whole read: retry each page alone.
                    return fault_in.read_later(together);
                }
                for wanted in together {
                    fault_in.complete(&wanted, first, outcome);
                }
            });
        }
    }

    /// Reads each page that is still in flight again, on the work queue: the caller may be a thread of
    /// the device, from which the device must not be called.
    fn read_later(self: &Arc<Self>, wanted: Vec<PageToRead>) {
        let weak = Arc::downgrade(self);
        self.pages.keeper.run(move || {
            if let Some(fault_in) = weak.upgrade() {
                fault_in.read_one_by_one(wanted);
            }
        });
    }

    /// Reads each page that is still in flight again. Read-ahead pages are included: a request may
    /// start to wait for one at any time, and must fail only if that page fails.
    fn read_one_by_one(self: &Arc<Self>, wanted: Vec<PageToRead>) {
        for wanted in wanted {
            if self.flights.owner(wanted.flight).is_some() {
                self.read(vec![wanted]);
            }
        }
    }

    /// Returns true if pages read from the backing device stay in memory: in the packed layout.
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
        let spilled = self.pages.spilled(slot, guard.word(), layer.header_owner(slot));
        let flight = self.flights.depart(guard, layer.owner(slot).bits(), waiting);
        kill_points::pass(KillPoint::PageInFlight);
        PageToRead { flight, spilled }
    }

    /// Ends the flight of one page when the read that includes it completes. `first` is the first
    /// block of that read.
    fn complete(
        self: &Arc<Self>,
        wanted: &PageToRead,
        first: u64,
        outcome: std::result::Result<&[u8], ReadError>,
    ) {
        let Some(store) = &self.pages.store else { return };
        // The flight may already have ended because the layer of its slot was removed.
        let Some(owner) = self.flights.owner(wanted.flight) else { return };
        if outcome != Err(ReadError::TimedOut)
            && let Some(moved) = self.moved(wanted)
        {
            return self.read_later(vec![moved]);
        }
        let object = outcome.ok().and_then(|buffer| store.object(&wanted.spilled, first, buffer));
        let Some(object) = object else {
            self.log_failed_read(store, wanted.spilled.slot, outcome.err());
            self.land(owner, wanted.flight, None, Err(Error::Media));
            return;
        };
        let place = BackRef::from_bits(owner);
        // Take a partial write of this very slot only: a write of a fork changes the fork's own
        // slot.
        let changes = |waiter: &Waiter| matches!(waiter, Waiter::Retry { ram, job, .. } if job.needs_content() && ram.layer_id() == place.table());
        if let Some(Waiter::Retry { ram, job, .. }) = self.flights.take_waiter(wanted.flight, changes) {
            return self.change(&ram, job, owner, wanted, object);
        }
        // In the plain layout the page stays on the device, as in the kernel.
        let back = if store.is_packed() { self.store_in_pool(owner, object, wanted) } else { None };
        let word = wanted.spilled.word;
        let content =
            if word.is_spilled_in_group() { Content::Group(object, word) } else { Content::Object(object) };
        self.land(owner, wanted.flight, back, Ok(content));
    }

    /// Returns the page with the present place of its group, if the group has moved on the device since
    /// the read began.
    fn moved(&self, wanted: &PageToRead) -> Option<PageToRead> {
        let Spilled { slot, word, place, header_owner } = wanted.spilled;
        let spilled = self.pages.spilled(slot, word, header_owner);
        (spilled.place != place).then_some(PageToRead { flight: wanted.flight, spilled })
    }

    /// Logs a failed read of a page. Without an `error` the content was damaged.
    #[cold]
    fn log_failed_read(&self, store: &Store, slot: u64, error: Option<ReadError>) {
        if error == Some(ReadError::TimedOut) {
            // `fail_timed_out_reads` logs all timed-out reads with one line.
            return store.record_failed_read();
        }
        let Some(held_back) = self.lines.admit(error) else { return };
        let name = self.pages.name();
        if let Some(ReadError::Failed(error)) = error {
            tracing::warn!("{name}: page {slot} cannot be read from backing_dev: {error}{held_back}");
        } else {
            tracing::warn!("{name}: page {slot} came back damaged from backing_dev{held_back}");
        }
    }

    /// Applies a partial write to the page that was read for the write. Stores only the changed
    /// page: memory need not hold the old object.
    fn change(&self, ram: &Ram, job: Job, owner: u64, wanted: &PageToRead, object: &[u8]) {
        let mut page = [0; PAGE_BYTES];
        let unpacked = self.pages.unpack_spilled(wanted.spilled.word, object, &mut page);
        let former = page;
        let content = unpacked.map(|()| Content::Page(&former));
        let (_, from, len) = piece(job.request.offset, job.request.len);
        job.part(len).put(from, &mut page);
        let stored =
            unpacked.and_then(|()| self.pages.store_page(&ram.0.layer(), wanted.spilled.slot, &page));
        let landed = match stored {
            Ok(word) => self.land_changed(ram, owner, wanted.flight, word, content),
            Err(_) => self.land(owner, wanted.flight, None, content).then_some(Ok(())),
        };
        match (stored, landed) {
            (Err(Error::NoSpace), _) => ram.wait_for_eviction(job),
            (Err(error), _) | (Ok(_), Some(Err(error))) => ram.fail_write(job, error),
            // Another thread ended the flight, or a snapshot is being taken: retry.
            (Ok(_), None) => self.pages.keeper.resume(ram.to_waiting(job)),
            (Ok(_), Some(Ok(()))) => ram.finish_page(job, len),
        }
    }

    /// Completes the read of an evicted page for a change: replaces the slot's word by `changed`, the
    /// location of the changed page in memory. The old page moves to the snapshot that needs it, and
    /// waiting readers receive the old content. Returns `None`, and frees the changed page, if the
    /// slot no longer refers to this read.
    fn land_changed(
        &self,
        ram: &Ram,
        owner: u64,
        flight: FlightId,
        changed: Word,
        content: Result<Content<'_>>,
    ) -> Option<Result<()>> {
        let place = BackRef::from_bits(owner);
        let landed = pin::pinned(|pin| {
            let view = ram.0.view.load(pin);
            // Do nothing if a rewind replaced the layer, or writers are frozen for a snapshot.
            let layer = Some(&view.layer).filter(|layer| layer.id() == place.table() && !view.is_frozen())?;
            let guard = layer.table().leaf(place.slot())?.lock(place.slot());
            if !self.flights.is_in(&guard, flight) {
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

    /// Stores an object read from the backing device in the pool. Returns the page's new word;
    /// `None` if memory is short.
    fn store_in_pool(&self, owner: u64, object: &[u8], wanted: &PageToRead) -> Option<Word> {
        let owner = BackRef::from_bits(owner);
        let layer = self.pages.layers.get(owner.table())?;
        if wanted.spilled.word.is_spilled_in_group() {
            return self.load_group(&layer, wanted.spilled.slot, wanted.spilled.word, object);
        }
        let has_space = layer.has_space(object.len());
        let location = has_space
            .then(|| {
                self.pages.pool.store(object, owner, self.pages.layers.pages_reserved_for_others(&layer)).ok()
            })
            .flatten();
        if location.is_none() {
            self.pages.keeper.kick();
        }
        location.map(|location| wanted.spilled.word.loaded_to(location))
    }

    /// As [`store_in_pool`](Self::store_in_pool), for a page whose group was read.
    fn load_group(&self, layer: &Layer, slot: u64, word: Word, object: &[u8]) -> Option<Word> {
        let pages = &self.pages;
        let groups = pages.groups()?;
        let loaded = if groups.is_sparse(word) {
            let mut page = [0; PAGE_BYTES];
            groups.unpack(word, object, &mut page).and_then(|()| pages.store_page(layer, slot, &page))
        } else if layer.has_space_for(groups::charged_bytes(object.len())) {
            groups.load(&pages.pool, word, object, pages.layers.pages_reserved_for_others(layer))
        } else {
            Err(Error::NoSpace)
        };
        if loaded.is_err() {
            pages.keeper.kick();
        }
        loaded.ok()
    }

    /// Moves the neighbours of a page, whose group is in memory again, to memory. `word` is the word of
    /// the page while the group was on the device.
    fn load_neighbours(&self, place: BackRef, word: Word, object: &[u8]) {
        let pages = &self.pages;
        let layer = pages.layers.get(place.table());
        let leaf = layer.as_ref().and_then(|layer| Some((layer, layer.table().leaf(place.slot())?)));
        let (Some((layer, leaf)), Some(groups)) = (leaf, pages.groups()) else { return };
        let first = place.slot() - place.slot() % GROUP_PAGES as u64;
        for slot in first..first + GROUP_PAGES as u64 {
            let is_neighbour =
                |other: Word| other.is_spilled_in_group() && groups::is_same_group(other, word);
            if !is_neighbour(leaf.peek(slot)) {
                continue;
            }
            let guard = leaf.lock(slot);
            let old = guard.word();
            if is_neighbour(old)
                && let Some(new) = groups.enter(old)
            {
                guard.publish(new.with_age(pages.ages.now()));
                layer.account_faulted_in(&pages.layers, new);
                groups.leave_device(&pages.pool, old, self.keeps_copies(layer).then_some(object));
            }
        }
    }

    /// Returns true if objects of pages that return to memory stay on the device. Without a memory
    /// limit no page is evicted.
    fn keeps_copies(&self, layer: &Layer) -> bool {
        layer.cap() != u64::MAX || self.pages.mem_limit() > 0
    }

    /// Ends a flight and passes the content or error to the waiters. `back` is the page's new word
    /// if the page is in memory again. Returns false if the flight had already ended; then `back`
    /// is freed.
    fn land(&self, owner: u64, flight: FlightId, back: Option<Word>, content: Result<Content<'_>>) -> bool {
        let owner = BackRef::from_bits(owner);
        let slot = owner.slot();
        let mut unpacked = None;
        let landed = self.pages.with_owner_slot(owner, |layer, guard| {
            if !self.flights.is_in(&guard, flight) {
                return None;
            }
            if let Ok(Content::Group(object, word)) = content
                && self.flights.has_waiters(&guard)
            {
                // While the page is a user of its group.
                let mut page = Box::new([0; PAGE_BYTES]);
                unpacked = Some(self.pages.unpack_spilled(word, object, &mut page).map(|()| page));
            }
            let now = self.pages.ages.now();
            let landed = self.flights.land(guard, |held| match back {
                Some(word) => word.with_age(now),
                None => held.touched(now),
            });
            if let Some(back) = back {
                layer.account_faulted_in(&self.pages.layers, back);
            }
            Some((landed, layer.header_owner(slot), self.keeps_copies(layer)))
        });
        let Some((landed, header_owner, keeps_copies)) = landed.flatten() else {
            if let Some(back) = back {
                self.pages.release(back);
            }
            return false;
        };
        if back.is_some() {
            kill_points::pass(KillPoint::PageRead);
        }
        match (back, content, &self.pages.store) {
            (None, ..) => {}
            (Some(back), Ok(Content::Group(object, word)), _) => {
                if let Some(groups) = self.pages.groups() {
                    groups.leave_device(&self.pages.pool, landed.held, keeps_copies.then_some(object));
                }
                // Before the waiters: a client that reads a neighbour next must find it in memory.
                if back.is_grouped() {
                    self.load_neighbours(owner, word, object);
                }
            }
            (Some(_), Ok(Content::Object(object)), Some(store)) if keeps_copies => {
                let algorithm = landed.held.algorithm() as u8;
                let content = CopyContent { header_owner, algorithm, object };
                let pool_pages = self.pages.pool.pages();
                store.keep_copy((owner.table(), slot), landed.held.location(), content, pool_pages);
            }
            (Some(_), ..) => self.pages.release(landed.held),
        }
        let content = match &unpacked {
            Some(unpacked) => unpacked.as_ref().map(|page| Content::Page(page)).map_err(|error| *error),
            None => content,
        };
        self.complete_waiters(landed, back.is_none(), content);
        true
    }

    /// Passes the content of a page whose flight ended, or the error, to the waiters. If the page
    /// is `still_spilled`, partial writes must wait for memory.
    fn complete_waiters(
        &self,
        landed: FlightResult<Waiter>,
        still_spilled: bool,
        content: Result<Content<'_>>,
    ) {
        let FlightResult { held, waiting } = landed;
        if waiting.is_empty() {
            return;
        }
        let mut page = [0; PAGE_BYTES];
        let outcome = content.and_then(|content| match content {
            Content::Object(object) => self.pages.unpack_spilled(held, object, &mut page),
            Content::Page(content) => {
                page = *content;
                Ok(())
            }
            // `land` has unpacked the page for its waiters.
            Content::Group(..) => Err(Error::Media),
        });
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
                    // The page is the parent's, which never changes: its content is valid even if
                    // the device changed meanwhile.
                    Ok(()) if job.needs_content() && !is_own => ram.put_over_parent(job, &mut page.clone()),
                    Ok(()) if job.needs_content() && still_spilled => ram.wait_for_eviction(job),
                    _ => self.pages.keeper.resume(ram.into_waiting(job)),
                },
            }
        }
    }

    /// Fails the reads of the backing device that timed out. Called once a second.
    pub(in crate::ram) fn fail_timed_out_reads(&self) {
        let Some(store) = &self.pages.store else { return };
        let late = store.take_timed_out_reads();
        if !late.is_empty() {
            let (reads, ms) = (late.len(), store.timeout_ms());
            if let Some(held_back) = self.lines.admit(Some(ReadError::TimedOut)) {
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
