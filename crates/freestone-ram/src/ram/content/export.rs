//! Copies pages of a snapshot in their stored form.
//!
//! Written-back pages are read from the backing device and stay there. Their slots do not go in
//! flight, so no request waits for these reads. A snapshot's page does not change, so the bytes
//! read are valid if their blocks were not reused during the read. The blocks' generations show
//! that. Pages of groups, in memory or on the device, are copied as pages of their own.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::{PRIORITIES, Page, Scratch, Streams};
use crate::ram::device::Ram;
use crate::ram::device::chain::Role;
use crate::ram::device::parent::Parent;
use crate::ram::device::source::{Incoming, next_in};
use crate::ram::geometry::next_multiple;
use crate::ram::memory::groups;
use crate::ram::memory::groups::object_reader::ObjectReader;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Device, Error};
use freestone_core::pin;
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};
use freestone_core::sync::mpsc;
use freestone_spill::layout::Place;
use freestone_spill::objects::{ReadGroup, Spilled};
use freestone_spill::store::Store;

/// Pause before pages in flight from the backing device are tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// The parent of a device.
#[derive(Clone)]
pub enum ParentDevice {
    /// No parent: empty slots read as zeroes.
    Nothing,
    /// A base: a device outside the family.
    Device(Arc<dyn Device>),
    /// A snapshot of the same family (devices that share a memory pool), which can have a parent
    /// too.
    Snapshot(Ram),
}

/// Stored form of a page. Each form has the stated bytes in [`CollectedPages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredForm {
    /// A page that repeats this 32-bit pattern; no bytes.
    Same(u32),
    /// A 64-bit pattern: the 8 bytes of the pattern.
    Pattern,
    /// Compressed by the algorithm with this priority in the family: the bytes of the object.
    Compressed(u8),
    /// Uncompressed: the 4096 bytes of the page.
    Huge,
    /// The snapshot reads the page from its parent, and an older snapshot may not; no bytes.
    Parent,
    /// The page cannot be read from the backing device or the file; no bytes.
    Lost {
        /// True if no retry can succeed.
        permanent: bool,
    },
}

struct Item {
    page: u64,
    stored: StoredForm,
    at: usize,
    len: usize,
}

/// Copied pages in stored form.
#[derive(Default)]
pub struct CollectedPages {
    items: Vec<Item>,
    data: Vec<u8>,
}

impl CollectedPages {
    fn clear(&mut self) {
        self.items.clear();
        self.data.clear();
    }

    fn push(&mut self, page: u64, stored: StoredForm, bytes: &[u8]) {
        self.items.push(Item { page, stored, at: self.data.len(), len: bytes.len() });
        self.data.extend_from_slice(bytes);
    }

    /// Iterates over the pages in ascending order: page number, form and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, StoredForm, &[u8])> {
        self.items.iter().map(|item| (item.page, item.stored, &self.data[item.at..item.at + item.len]))
    }
}

/// A written-back page, with the [sum of the generations](generations) of the blocks of its object
/// when its slot was read.
struct OnDevice {
    spilled: Spilled,
    generations: u64,
}

impl AsRef<Spilled> for OnDevice {
    fn as_ref(&self) -> &Spilled {
        &self.spilled
    }
}

enum Found {
    Parent,
    Copied,
    /// A page of a group, which is saved as a page of its own, or the error of its read.
    Grouped(Result<Box<Page>, Error>),
    InFlight,
    Spilled(OnDevice),
}

/// Reading of snapshots in stored form.
pub trait ReadStored {
    /// Returns a number that identifies the device among all existing devices.
    fn identity(&self) -> usize;

    /// Returns an id of this snapshot's chain (a device and its snapshots), and the snapshot's
    /// number in the chain; `None` for a live device. Older snapshots have smaller numbers.
    fn place_in_chain(&self) -> Option<(usize, u64)>;

    /// Returns the next pages, from `page` on, that this snapshot or its chain may hold; `None` if
    /// no more exist. All returned pages are in one leaf of the slot table.
    fn next_held(&self, page: u64) -> Option<Range<u64>>;

    /// Copies the pages of a range that the snapshot or its chain holds, in stored form, without
    /// changing ages and idle marks. With an older snapshot `since` of the chain, copies only pages
    /// that differ from it. Unreadable pages become [`StoredForm::Lost`].
    ///
    /// # Errors
    /// Fails if a page of the file being loaded cannot be read for another reason than damage.
    /// Returns the page number and the error.
    fn copy_pages(
        &self,
        pages: Range<u64>,
        since: Option<&Self>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)>;

    /// Copies these pages in stored form. Pages that neither the snapshot nor its chain holds
    /// become [`StoredForm::Parent`].
    fn copy_changed(
        &self,
        pages: Vec<u64>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)>;

    /// Calls `look` with the compression streams of a priority, and true if automatic recompression
    /// made them. Returns `None` if the priority has no algorithm.
    fn streams<R>(&self, priority: u8, look: impl FnOnce(&Streams, bool) -> R) -> Option<R>;
}

impl ReadStored for Ram {
    fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    fn place_in_chain(&self) -> Option<(usize, u64)> {
        pin::pinned(|pin| match &self.0.view.load(pin).role {
            Role::Snapshot { chain, number } => Some((Arc::as_ptr(chain) as usize, *number)),
            Role::Live { .. } => None,
        })
    }

    fn next_held(&self, page: u64) -> Option<Range<u64>> {
        let end = self.0.slots();
        // Get the file before reading the slots: a page loaded meanwhile is then found in the file
        // or in its slot.
        let here = self.0.parent.staged_source();
        let page = page.min(end);
        let first = page + pin::pinned(|pin| self.0.view.load(pin).run_of_parent(pin, page, end));
        let first = here.and_then(|here| next_in(&*here.source, page, first)).unwrap_or(first);
        (first < end).then(|| first..next_multiple(first, LEAF_SLOTS).min(end))
    }

    fn copy_pages(
        &self,
        pages: Range<u64>,
        since: Option<&Self>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        // Pages found in the same layer are equal. A page that moves between layers between the two
        // lookups counts as different, which only copies it needlessly. Equal holders always mean
        // equal pages: a page of a snapshot older than this one never moves to this one or a
        // younger one.
        let is_same = |page| since.is_some_and(|older| older.holder(page) == self.holder(page));
        self.copy_all(pages.filter(|&page| !is_same(page)).collect(), since.is_some(), into)
    }

    fn copy_changed(
        &self,
        pages: Vec<u64>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        self.copy_all(pages, true, into)
    }

    fn streams<R>(&self, priority: u8, look: impl FnOnce(&Streams, bool) -> R) -> Option<R> {
        let trained = usize::from(priority) == PRIORITIES && self.0.family.auto.is_on();
        self.0.pages.codecs.get(priority.into()).map(|streams| look(streams, trained))
    }
}

impl Ram {
    /// Returns the parent of the device; for a snapshot, the parent of its origin.
    pub fn parent_device(&self) -> ParentDevice {
        match self.0.parent.loaded() {
            Parent::Nothing | Parent::Staged(_) => ParentDevice::Nothing,
            Parent::Device(base) => ParentDevice::Device(Arc::clone(&base.device)),
            Parent::Snapshot(ram) => ParentDevice::Snapshot(ram.clone()),
        }
    }

    /// Returns the table id of the layer that holds a page; `None` if no layer does, so that the
    /// page is read from the parent.
    fn holder(&self, page: u64) -> Option<u32> {
        pin::pinned(|pin| {
            self.0.view.load(pin).with_page(pin, page, |found| found.map(|(layer, _)| layer.id()))
        })
    }

    fn copy_all(
        &self,
        mut ask: Vec<u64>,
        also_parents: bool,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        into.clear();
        while !ask.is_empty() {
            // Get the file before reading the slots: a page loaded meanwhile is then found in the
            // file or in its slot.
            let here = self.0.parent.staged_source();
            let (mut spilled, mut again) = (Vec::new(), Vec::new());
            for page in ask {
                match (self.copy_own_page(page, into), &here) {
                    (Found::Parent, Some(here)) if here.has(page) => {
                        let mut push = |incoming: Incoming<'_>| {
                            self.push_incoming(page, incoming, into);
                            Ok(())
                        };
                        match here.source.fetch(page, &mut push) {
                            Err(Error::Media) => {
                                let permanent = here.source.is_lost(page);
                                into.push(page, StoredForm::Lost { permanent }, &[]);
                            }
                            fetched => fetched.map_err(|error| (page, error))?,
                        }
                    }
                    (Found::Parent, _) if also_parents => into.push(page, StoredForm::Parent, &[]),
                    (Found::Parent | Found::Copied, _) => {}
                    (Found::Grouped(Ok(content)), _) => {
                        Self::push_page(page, &content, self.0.pages.codecs.strongest(), into);
                    }
                    (Found::Grouped(Err(error)), _) => {
                        into.push(page, StoredForm::Lost { permanent: error == Error::Media }, &[]);
                    }
                    (Found::InFlight, _) => again.push(page),
                    (Found::Spilled(found), _) => spilled.push(found),
                }
            }
            if !again.is_empty() {
                // Each page's flight ends, at the latest when its read times out.
                freestone_core::sync::thread::sleep(PAUSE);
            }
            if !spilled.is_empty() {
                self.read_spilled(spilled, into, &mut again);
            }
            ask = again;
        }
        into.items.sort_unstable_by_key(|item| item.page);
        Ok(())
    }

    /// Adds a page that is not loaded yet, as its source provided it.
    fn push_incoming(&self, page: u64, incoming: Incoming<'_>, into: &mut CollectedPages) {
        match incoming {
            Incoming::Parent => into.push(page, StoredForm::Same(0), &[]),
            Incoming::Same(pattern) => into.push(page, StoredForm::Same(pattern), &[]),
            Incoming::Pattern(pattern) => into.push(page, StoredForm::Pattern, &pattern),
            Incoming::Compressed { priority, object } => {
                into.push(page, StoredForm::Compressed(priority), object);
            }
            Incoming::Huge(content) => into.push(page, StoredForm::Huge, content),
            Incoming::Page(content) => {
                Self::push_page(page, content, (0, self.0.pages.codecs.primary()), into);
            }
        }
    }

    /// Adds an uncompressed page, compressed with the algorithm of a priority.
    fn push_page(
        page: u64,
        content: &Page,
        (priority, streams): (usize, &Streams),
        into: &mut CollectedPages,
    ) {
        let mut scratch = Scratch::new();
        match streams.compress(content, &mut scratch) {
            Some(object) => into.push(page, StoredForm::Compressed(priority as u8), object),
            None => into.push(page, StoredForm::Huge, content),
        }
    }

    fn copy_own_page(&self, page: u64, into: &mut CollectedPages) -> Found {
        let pages = &self.0.pages;
        pin::pinned(|pin| {
            self.0.view.load(pin).with_page(pin, page, |found| {
                let Some((layer, guard)) = found else { return Found::Parent };
                let word = guard.word();
                let stored = match word.kind() {
                    Kind::Empty | Kind::Base => return Found::Parent,
                    Kind::InFlight => return Found::InFlight,
                    Kind::Spilled => {
                        let spilled = pages.spilled(page, word, layer.header_owner(page));
                        let place = spilled.place;
                        let generations = pages.store.as_ref().map_or(0, |store| generations(store, place));
                        return Found::Spilled(OnDevice { spilled, generations });
                    }
                    Kind::Same => StoredForm::Same(word.location() as u32),
                    Kind::Pattern => StoredForm::Pattern,
                    Kind::Compressed => StoredForm::Compressed(word.algorithm() as u8),
                    Kind::Huge => StoredForm::Huge,
                    Kind::Grouped if word.is_shared() => {
                        let mut copy = [0; PAGE_BYTES];
                        // The word of an object that exists states its form.
                        let object = pages.copy_shared(word, &mut copy).unwrap_or(Word::EMPTY);
                        let stored = match object.kind() {
                            Kind::Compressed => StoredForm::Compressed(object.algorithm() as u8),
                            Kind::Huge => StoredForm::Huge,
                            _ => StoredForm::Lost { permanent: true },
                        };
                        into.push(page, stored, &copy[..object.stored_bytes()]);
                        return Found::Copied;
                    }
                    Kind::Grouped => {
                        let mut content = Box::new([0; PAGE_BYTES]);
                        return Found::Grouped(pages.load(&guard, &mut content).map(|()| content));
                    }
                };
                into.push(page, stored, pages.pool.object(&guard));
                Found::Copied
            })
        })
    }

    /// Reads written-back pages from the backing device and adds them to `into`. Pages that moved
    /// meanwhile are added to `again`.
    fn read_spilled(&self, spilled: Vec<OnDevice>, into: &mut CollectedPages, again: &mut Vec<u64>) {
        let failed = match &self.0.pages.store {
            Some(store) => {
                let groups = store.group_reads(spilled);
                let failed = self.read_groups(store, groups, into, again);
                // A single bad page may have failed the read of a whole group: retry each page alone.
                let ones = failed.into_iter().flat_map(|found| store.group_reads(vec![found])).collect();
                self.read_groups(store, ones, into, again)
            }
            None => spilled,
        };
        for failed in failed {
            into.push(failed.spilled.slot, StoredForm::Lost { permanent: false }, &[]);
        }
    }

    /// Reads groups of written-back pages concurrently. Returns the pages that could not be read.
    fn read_groups(
        &self,
        store: &Arc<Store>,
        groups: Vec<ReadGroup<OnDevice>>,
        into: &mut CollectedPages,
        again: &mut Vec<u64>,
    ) -> Vec<OnDevice> {
        let (answer, answers) = mpsc::channel();
        let mut waiting = Vec::new();
        for (number, group) in groups.into_iter().enumerate() {
            let answer = answer.clone();
            store.read(group.first, group.blocks, move |outcome| {
                // Cannot fail: the receiver exists until all results have arrived.
                let _ = answer.send((number, outcome.map(<[u8]>::to_vec)));
            });
            waiting.push(Some(group));
        }
        drop(answer);
        let mut failed = Vec::new();
        let mut reader = GroupOnDevice::default();
        // Every read completes, at the latest by its time-out.
        while let Ok((number, outcome)) = answers.recv() {
            let Some(ReadGroup { first, pages, .. }) = waiting[number].take() else { continue };
            let Ok(buffer) = outcome else {
                failed.extend(pages);
                continue;
            };
            for found in pages {
                if generations(store, found.spilled.place) != found.generations {
                    again.push(found.spilled.slot);
                } else if let Some(object) = store.object(&found.spilled, first, &buffer) {
                    if found.spilled.word.is_spilled_in_group() {
                        self.add_grouped(&found.spilled, object, &mut reader, into);
                    } else {
                        self.add_spilled(store, &found.spilled, object, into);
                    }
                } else {
                    failed.push(found);
                }
            }
            // The next buffer may have another group at the same place.
            reader.place = None;
        }
        failed.extend(waiting.into_iter().flatten().flat_map(|group| group.pages));
        failed
    }

    /// Adds a page of a group, whose object was read from the backing device.
    fn add_grouped(
        &self,
        spilled: &Spilled,
        object: &[u8],
        reader: &mut GroupOnDevice,
        into: &mut CollectedPages,
    ) {
        match reader.page(spilled, object) {
            Ok(content) => Self::push_page(spilled.slot, content, self.0.pages.codecs.strongest(), into),
            Err(error) => {
                into.push(spilled.slot, StoredForm::Lost { permanent: error == Error::Media }, &[]);
            }
        }
    }

    /// Adds a written-back page, given as the object read from the backing device.
    fn add_spilled(&self, store: &Store, spilled: &Spilled, object: &[u8], into: &mut CollectedPages) {
        let &Spilled { slot, word, .. } = spilled;
        match <&Page>::try_from(object) {
            Err(_) => into.push(slot, StoredForm::Compressed(word.algorithm() as u8), object),
            Ok(_) if store.is_packed() => into.push(slot, StoredForm::Huge, object),
            // The plain layout has uncompressed pages: compress the page first.
            Ok(content) => Self::push_page(slot, content, (0, self.0.pages.codecs.primary()), into),
        }
    }
}

/// The group on the backing device whose pages are read. Successive pages of a group decompress it
/// once.
#[derive(Default)]
struct GroupOnDevice {
    reader: Option<ObjectReader>,
    place: Option<Place>,
}

impl GroupOnDevice {
    fn page(&mut self, spilled: &Spilled, object: &[u8]) -> Result<&Page, Error> {
        let reader = self.reader.take().map_or_else(ObjectReader::new, Ok)?;
        let reader = self.reader.insert(reader);
        if self.place != Some(spilled.place) {
            reader.begin();
            self.place = Some(spilled.place);
        }
        let read = reader.page_of(object, groups::position_of(spilled.word));
        read.inspect_err(|_| self.place = None)
    }
}

/// Returns the sum of the generations of an object's blocks. A generation counts how often the block
/// was reused, so an equal sum later means that no block was reused.
fn generations(store: &Store, place: Place) -> u64 {
    let (first, count) = store.blocks_of(place);
    (first..first + u64::from(count)).map(|block| u64::from(store.map().generation(block))).sum()
}
