//! Pages of a snapshot in their stored form, and their insertion into a new device: used by
//! [`save`](crate::save) and [`keep`](crate::keep).
//!
//! Written-back pages are read from the backing device and stay there. No slot goes in flight for
//! this, so no request waits. A snapshot's page does not change, and the bytes are valid if no
//! block of them was reused since (checked by generation).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::chain::Role;
use super::layer::Layer;
use super::pages::Pages;
use super::parent::Parent;
use super::source::{Incoming, next_in};
use super::{Family, Ram};
use crate::codec::{Algorithm, Dictionary, PRIORITIES, Page, Scratch, Streams};
use crate::spill::objects::{ReadGroup, Spilled};
use crate::spill::store::Store;
use freestone_core::device::{Device, Error, Result};
use freestone_core::pin;
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};
use freestone_core::sync::mpsc;

/// Pause before retrying a page in flight.
const PAUSE: Duration = Duration::from_millis(1);

/// The parent of a device.
pub enum Lower {
    /// Reads as zeroes.
    Nothing,
    /// A base.
    Device(Arc<dyn Device>),
    /// A snapshot of the same family, with a parent of its own.
    Snapshot(Ram),
}

/// Stored form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// A 32-bit pattern; no bytes.
    Same(u32),
    /// A 64-bit pattern; 8 bytes.
    Pattern,
    /// Compressed by the algorithm of this priority.
    Compressed(u8),
    Huge,
    /// The page reads from the parent, unlike in an older snapshot; no bytes.
    Parent,
    /// The page cannot be read; no bytes.
    Lost {
        /// Whether no retry can succeed.
        for_good: bool,
    },
}

/// A collected page.
struct Item {
    page: u64,
    stored: Stored,
    at: usize,
    len: usize,
}

/// Collected pages in stored form.
#[derive(Default)]
pub(crate) struct CollectedPages {
    items: Vec<Item>,
    data: Vec<u8>,
}

impl CollectedPages {
    fn clear(&mut self) {
        self.items.clear();
        self.data.clear();
    }

    fn push(&mut self, page: u64, stored: Stored, bytes: &[u8]) {
        self.items.push(Item { page, stored, at: self.data.len(), len: bytes.len() });
        self.data.extend_from_slice(bytes);
    }

    /// Iterates over the pages in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Stored, &[u8])> {
        self.items.iter().map(|item| (item.page, item.stored, &self.data[item.at..item.at + item.len]))
    }
}

/// A written-back page, with its blocks' generations when its slot was read.
struct OnDevice {
    spilled: Spilled,
    generations: [u32; 2],
}

impl AsRef<Spilled> for OnDevice {
    fn as_ref(&self) -> &Spilled {
        &self.spilled
    }
}

enum Found {
    Parent,
    Copied,
    InFlight,
    Spilled(OnDevice),
}

// ---- out ----------------------------------------------------------------------------------------

impl Ram {
    /// Returns a number that is unique among existing devices.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Returns the parent of the device; for a snapshot, the parent of its origin.
    pub fn lower(&self) -> Lower {
        match self.0.parent.loaded() {
            Parent::Nothing | Parent::Staged(_) => Lower::Nothing,
            Parent::Device(base) => Lower::Device(Arc::clone(&base.device)),
            Parent::Snapshot(ram) => Lower::Snapshot(ram.clone()),
        }
    }

    /// Returns an id of this snapshot's chain and the snapshot's number in it. Older snapshots have
    /// smaller numbers.
    pub(crate) fn place_in_chain(&self) -> Option<(usize, u64)> {
        pin::pinned(|pin| match &self.0.view.load(pin).role {
            Role::Snapshot { chain, number } => Some((Arc::as_ptr(chain) as usize, *number)),
            Role::Live { .. } => None,
        })
    }

    /// Returns the id of the layer that holds a page; `None` if the parent has it.
    fn holder(&self, page: u64) -> Option<u32> {
        pin::pinned(|pin| {
            self.0.view.load(pin).with_page(pin, page, |found| found.map(|(layer, _)| layer.id()))
        })
    }

    /// Returns the next pages, from `page` on, that this snapshot or its chain may hold: all in one
    /// leaf.
    pub(crate) fn next_held(&self, page: u64) -> Option<Range<u64>> {
        let end = self.0.slots();
        // Taken before the slots are read: a page loaded meanwhile is found in one of them.
        let here = self.0.parent.staged_source();
        let page = page.min(end);
        let first = page + pin::pinned(|pin| self.0.view.load(pin).run_of_parent(pin, page, end));
        let first = here.and_then(|here| next_in(&*here.source, page, first)).unwrap_or(first);
        (first < end).then(|| first..super::next_multiple(first, LEAF_SLOTS).min(end))
    }

    /// Copies the pages of this range that the snapshot or its chain holds, in stored form, without
    /// changing ages and idle marks. With an older snapshot `since` of the chain, only pages that
    /// differ from it. Unreadable pages become [`Stored::Lost`].
    ///
    /// # Errors
    /// Fails if memory for a page is short; returns the page.
    pub(crate) fn copy_pages(
        &self,
        pages: Range<u64>,
        since: Option<&Self>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        // Pages found in the same layer are equal. A page that moves to a younger snapshot between
        // the two lookups counts as different, which is harmless. A page in a snapshot older than
        // this one never moves to this one or a younger one.
        let is_same = |page| since.is_some_and(|older| older.holder(page) == self.holder(page));
        self.copy_all(pages.filter(|&page| !is_same(page)).collect(), since.is_some(), into)
    }

    /// Copies these pages. Those that neither the snapshot nor its chain holds become
    /// [`Stored::Parent`].
    ///
    /// # Errors
    /// As [`copy_pages`](Self::copy_pages).
    pub(crate) fn copy_changed(
        &self,
        pages: Vec<u64>,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        self.copy_all(pages, true, into)
    }

    fn copy_all(
        &self,
        mut ask: Vec<u64>,
        also_parents: bool,
        into: &mut CollectedPages,
    ) -> std::result::Result<(), (u64, Error)> {
        into.clear();
        while !ask.is_empty() {
            // Taken before the slots are read: a page loaded meanwhile is found in one of them.
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
                                let for_good = here.source.is_lost(page);
                                into.push(page, Stored::Lost { for_good }, &[]);
                            }
                            fetched => fetched.map_err(|error| (page, error))?,
                        }
                    }
                    (Found::Parent, _) if also_parents => into.push(page, Stored::Parent, &[]),
                    (Found::Parent | Found::Copied, _) => {}
                    (Found::InFlight, _) => again.push(page),
                    (Found::Spilled(found), _) => spilled.push(found),
                }
            }
            if !again.is_empty() {
                // The page lands, at the latest when its read times out.
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

    /// Adds a page that is not loaded yet.
    fn push_incoming(&self, page: u64, incoming: Incoming<'_>, into: &mut CollectedPages) {
        match incoming {
            Incoming::Parent => into.push(page, Stored::Same(0), &[]),
            Incoming::Same(pattern) => into.push(page, Stored::Same(pattern), &[]),
            Incoming::Pattern(pattern) => into.push(page, Stored::Pattern, &pattern),
            Incoming::Compressed { priority, object } => {
                into.push(page, Stored::Compressed(priority), object);
            }
            Incoming::Huge(content) => into.push(page, Stored::Huge, content),
            Incoming::Page(content) => {
                let mut scratch = Scratch::new();
                match self.0.pages.codecs.primary().compress(content, &mut scratch) {
                    Some(object) => into.push(page, Stored::Compressed(0), object),
                    None => into.push(page, Stored::Huge, content),
                }
            }
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
                        let spilled = Spilled { slot: page, word, header_owner: layer.header_owner(page) };
                        let generations =
                            pages.store.as_ref().map_or([0; 2], |store| generations(store, word));
                        return Found::Spilled(OnDevice { spilled, generations });
                    }
                    Kind::Same => Stored::Same(word.location() as u32),
                    Kind::Pattern => Stored::Pattern,
                    Kind::Compressed => Stored::Compressed(word.algorithm() as u8),
                    Kind::Huge => Stored::Huge,
                };
                into.push(page, stored, pages.pool.object(&guard));
                Found::Copied
            })
        })
    }

    /// Reads written-back pages. Pages that moved meanwhile are added to `again`.
    fn read_spilled(&self, spilled: Vec<OnDevice>, into: &mut CollectedPages, again: &mut Vec<u64>) {
        let failed = match &self.0.pages.store {
            Some(store) => {
                let groups = store.group_reads(spilled);
                let failed = self.read_groups(store, groups, into, again);
                // One bad page may have failed the whole group: retry each.
                let ones = failed.into_iter().flat_map(|found| store.group_reads(vec![found])).collect();
                self.read_groups(store, ones, into, again)
            }
            None => spilled,
        };
        for failed in failed {
            into.push(failed.spilled.slot, Stored::Lost { for_good: false }, &[]);
        }
    }

    /// Reads groups of pages concurrently; returns the pages that could not be read.
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
                // The receiver exists until all results have arrived.
                let _ = answer.send((number, outcome.map(<[u8]>::to_vec)));
            });
            waiting.push(Some(group));
        }
        drop(answer);
        let mut failed = Vec::new();
        // Every read completes, at the latest by its time-out.
        while let Ok((number, outcome)) = answers.recv() {
            let Some(ReadGroup { first, pages, .. }) = waiting[number].take() else { continue };
            let Ok(buffer) = outcome else {
                failed.extend(pages);
                continue;
            };
            for found in pages {
                if generations(store, found.spilled.word) != found.generations {
                    again.push(found.spilled.slot);
                } else if let Some(object) = store.object(&found.spilled, first, &buffer) {
                    self.add_spilled(store, &found.spilled, object, into);
                } else {
                    failed.push(found);
                }
            }
        }
        failed.extend(waiting.into_iter().flatten().flat_map(|group| group.pages));
        failed
    }

    /// Adds one page that was read.
    fn add_spilled(&self, store: &Store, spilled: &Spilled, object: &[u8], into: &mut CollectedPages) {
        let &Spilled { slot, word, .. } = spilled;
        let mut scratch = Scratch::new();
        match <&Page>::try_from(object) {
            Err(_) => into.push(slot, Stored::Compressed(word.algorithm() as u8), object),
            Ok(_) if store.is_packed() => into.push(slot, Stored::Huge, object),
            // In the plain layout pages are uncompressed.
            Ok(content) => match self.0.pages.codecs.primary().compress(content, &mut scratch) {
                Some(object) => into.push(slot, Stored::Compressed(0), object),
                None => into.push(slot, Stored::Huge, content),
            },
        }
    }

    /// Calls `look` with the streams of a priority, and true if the automatic mode made them.
    pub(crate) fn streams<R>(&self, priority: u8, look: impl FnOnce(&Streams, bool) -> R) -> Option<R> {
        let trained = usize::from(priority) == PRIORITIES && self.0.family.auto.is_on();
        self.0.pages.codecs.get(priority.into()).map(|streams| look(streams, trained))
    }
}

/// Returns the generations of the first and last block of an object.
fn generations(store: &Store, spilled: Word) -> [u32; 2] {
    let (first, count) = store.blocks_of(spilled);
    let last = first + u64::from(count) - 1;
    [store.map().generation(first), store.map().generation(last)]
}

// ---- in -----------------------------------------------------------------------------------------

impl Ram {
    /// Stores a page. The old content moves to the snapshots that need it, as with a write.
    ///
    /// # Errors
    /// Fails if memory is short, under the limit or in the machine.
    pub(crate) fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        let pages = &self.0.pages;
        let new = pages.word_of(&self.0.layer(), page, incoming)?;
        let put = pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let guard = view.layer.table().leaf_or_new(page)?.lock(page);
            if guard.word().kind() == Kind::InFlight {
                return Err(Error::Media);
            }
            view.replace(pages, page, guard, new)
        });
        if put.is_err() {
            pages.release(new);
        }
        put
    }

    /// Returns true if pages can be evicted, so that a write may wait for space.
    pub(crate) fn can_spill(&self) -> bool {
        self.0.pages.store.is_some()
    }
}

impl Pages {
    /// Stores an incoming page for a slot and returns the slot's word.
    pub(super) fn word_of(&self, layer: &Layer, page: u64, incoming: Incoming<'_>) -> Result<Word> {
        let object = |bytes: &[u8]| self.store_object(layer, page, bytes);
        let new = match incoming {
            Incoming::Parent => return Ok(Word::EMPTY),
            Incoming::Same(pattern) => Word::same(pattern),
            Incoming::Pattern(pattern) => Word::pattern(object(&pattern)?),
            Incoming::Compressed { priority, object: bytes } => {
                Word::compressed(object(bytes)?, bytes.len() as u32, priority)
            }
            Incoming::Huge(content) => Word::huge(object(content)?),
            Incoming::Page(content) => self.store_page(layer, page, content)?,
        };
        Ok(new.with_age(self.ages.now()))
    }
}

impl Family {
    /// Returns true if the device belongs to this family.
    pub(crate) fn has(&self, ram: &Ram) -> bool {
        Arc::ptr_eq(&self.0, &ram.0.family)
    }

    /// Returns the algorithm for newly written pages.
    pub(crate) fn comp_algorithm(&self) -> Algorithm {
        self.0.pages.codecs.primary().algorithm()
    }

    /// Returns the priority whose algorithm can read objects of `algorithm`; preferably the same
    /// algorithm.
    pub(crate) fn priority_to_read(
        &self,
        algorithm: Algorithm,
        dictionary: Option<&Dictionary>,
    ) -> Option<u8> {
        let find = |fits: &dyn Fn(Algorithm) -> bool| {
            (0..=PRIORITIES).find(|&priority| {
                let streams = self.0.pages.codecs.get(priority);
                streams.is_some_and(|s| {
                    fits(s.algorithm()) && dictionary_bytes(s.dictionary()) == dictionary_bytes(dictionary)
                })
            })
        };
        let is_lz4 = |a| matches!(a, Algorithm::Lz4 | Algorithm::Lz4hc);
        let same_format = |a: Algorithm| is_lz4(a) && is_lz4(algorithm);
        find(&|a| a == algorithm).or_else(|| find(&same_format)).map(|priority| priority as u8)
    }

    /// Sets the trained streams of the automatic mode, if it has none yet and the family has no
    /// devices.
    pub(crate) fn adopt_trained<E>(
        &self,
        learned: impl FnOnce() -> std::result::Result<Arc<Streams>, E>,
    ) -> std::result::Result<(), E> {
        // No training starts before pages exist.
        let has_none = self.0.auto.is_on() && self.0.pages.codecs.get(PRIORITIES).is_none();
        if has_none && self.0.pages.layers.all().is_empty() {
            // Streams trained meanwhile take precedence.
            let _ = self.0.pages.codecs.set(PRIORITIES, learned()?);
        }
        Ok(())
    }
}

/// Dictionaries are compared by content.
fn dictionary_bytes(dictionary: Option<&Dictionary>) -> Option<&[u8]> {
    dictionary.map(Dictionary::bytes)
}
