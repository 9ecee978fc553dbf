//! Copies pages of a snapshot in their stored form, and stores such pages in a new device. Used by
//! [`save`](crate::save) and [`keep`](crate::keep).
//!
//! Written-back pages are read from the backing device and stay there. Their slots do not go in
//! flight, so no request waits for these reads. A snapshot's page does not change, so the bytes
//! read are valid if their blocks were not reused during the read. The blocks' generations show
//! that.

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

/// Pause before pages in flight from the backing device are tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// The parent of a device.
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
pub(crate) enum StoredForm {
    /// A page that repeats this 32-bit pattern; no bytes.
    Same(u32),
    /// A 64-bit pattern: the 8 bytes of the pattern.
    Pattern,
    /// Compressed by the algorithm with this priority in the family: the bytes of the object.
    Compressed(u8),
    Huge,
    /// The snapshot reads the page from its parent, and an older snapshot may not; no bytes.
    Parent,
    /// The page cannot be read from the backing device or the file; no bytes.
    Lost {
        /// True if no retry can succeed.
        permanent: bool,
    },
}

/// A copied page.
struct Item {
    page: u64,
    stored: StoredForm,
    at: usize,
    len: usize,
}

/// Copied pages in stored form.
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

    fn push(&mut self, page: u64, stored: StoredForm, bytes: &[u8]) {
        self.items.push(Item { page, stored, at: self.data.len(), len: bytes.len() });
        self.data.extend_from_slice(bytes);
    }

    /// Iterates over the pages in ascending order: page number, form and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, StoredForm, &[u8])> {
        self.items.iter().map(|item| (item.page, item.stored, &self.data[item.at..item.at + item.len]))
    }
}

/// A written-back page, with the generations of its first and last block when its slot was read.
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
    /// Returns a number that identifies the device among all existing devices.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Returns the parent of the device; for a snapshot, the parent of its origin.
    pub fn parent_device(&self) -> ParentDevice {
        match self.0.parent.loaded() {
            Parent::Nothing | Parent::Staged(_) => ParentDevice::Nothing,
            Parent::Device(base) => ParentDevice::Device(Arc::clone(&base.device)),
            Parent::Snapshot(ram) => ParentDevice::Snapshot(ram.clone()),
        }
    }

    /// Returns an id of this snapshot's chain (a device and its snapshots), and the snapshot's
    /// number in the chain; `None` for a live device. Older snapshots have smaller numbers.
    pub(crate) fn place_in_chain(&self) -> Option<(usize, u64)> {
        pin::pinned(|pin| match &self.0.view.load(pin).role {
            Role::Snapshot { chain, number } => Some((Arc::as_ptr(chain) as usize, *number)),
            Role::Live { .. } => None,
        })
    }

    /// Returns the table id of the layer that holds a page; `None` if no layer does, so that the
    /// page is read from the parent.
    fn holder(&self, page: u64) -> Option<u32> {
        pin::pinned(|pin| {
            self.0.view.load(pin).with_page(pin, page, |found| found.map(|(layer, _)| layer.id()))
        })
    }

    /// Returns the next pages, from `page` on, that this snapshot or its chain may hold; `None` if
    /// no more exist. All returned pages are in one leaf of the slot table.
    pub(crate) fn next_held(&self, page: u64) -> Option<Range<u64>> {
        let end = self.0.slots();
        // Get the file before reading the slots: a page loaded meanwhile is then found in the file
        // or in its slot.
        let here = self.0.parent.staged_source();
        let page = page.min(end);
        let first = page + pin::pinned(|pin| self.0.view.load(pin).run_of_parent(pin, page, end));
        let first = here.and_then(|here| next_in(&*here.source, page, first)).unwrap_or(first);
        (first < end).then(|| first..super::next_multiple(first, LEAF_SLOTS).min(end))
    }

    /// Copies the pages of a range that the snapshot or its chain holds, in stored form, without
    /// changing ages and idle marks. With an older snapshot `since` of the chain, copies only pages
    /// that differ from it. Unreadable pages become [`StoredForm::Lost`].
    ///
    /// # Errors
    /// Fails if a page of the file being loaded cannot be read for another reason than damage.
    /// Returns the page number and the error.
    pub(crate) fn copy_pages(
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

    /// Copies these pages in stored form. Pages that neither the snapshot nor its chain holds
    /// become [`StoredForm::Parent`].
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
                let mut scratch = Scratch::new();
                match self.0.pages.codecs.primary().compress(content, &mut scratch) {
                    Some(object) => into.push(page, StoredForm::Compressed(0), object),
                    None => into.push(page, StoredForm::Huge, content),
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
                    Kind::Same => StoredForm::Same(word.location() as u32),
                    Kind::Pattern => StoredForm::Pattern,
                    Kind::Compressed => StoredForm::Compressed(word.algorithm() as u8),
                    Kind::Huge => StoredForm::Huge,
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
                // One bad page may have failed the read of a whole group: retry each page alone.
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

    /// Adds a written-back page, given as the object read from the backing device.
    fn add_spilled(&self, store: &Store, spilled: &Spilled, object: &[u8], into: &mut CollectedPages) {
        let &Spilled { slot, word, .. } = spilled;
        let mut scratch = Scratch::new();
        match <&Page>::try_from(object) {
            Err(_) => into.push(slot, StoredForm::Compressed(word.algorithm() as u8), object),
            Ok(_) if store.is_packed() => into.push(slot, StoredForm::Huge, object),
            // The plain layout has uncompressed pages: compress the page first.
            Ok(content) => match self.0.pages.codecs.primary().compress(content, &mut scratch) {
                Some(object) => into.push(slot, StoredForm::Compressed(0), object),
                None => into.push(slot, StoredForm::Huge, content),
            },
        }
    }

    /// Calls `look` with the compression streams of a priority, and true if automatic recompression
    /// made them. Returns `None` if the priority has no algorithm.
    pub(crate) fn streams<R>(&self, priority: u8, look: impl FnOnce(&Streams, bool) -> R) -> Option<R> {
        let trained = usize::from(priority) == PRIORITIES && self.0.family.auto.is_on();
        self.0.pages.codecs.get(priority.into()).map(|streams| look(streams, trained))
    }
}

/// Returns the generations of the first and last block of a written-back page's object: how often
/// each block was reused.
fn generations(store: &Store, spilled: Word) -> [u32; 2] {
    let (first, count) = store.blocks_of(spilled);
    let last = first + u64::from(count) - 1;
    [store.map().generation(first), store.map().generation(last)]
}

// ---- in -----------------------------------------------------------------------------------------

impl Ram {
    /// Stores a page in the device. The old content moves to the snapshot that needs it, as with a
    /// write.
    ///
    /// # Errors
    /// Fails if the memory limit leaves no space ([`Error::NoSpace`]), or the system has no memory
    /// ([`Error::NoMemory`]).
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

    /// Returns true if the family has a backing device: pages can be evicted, so a write may wait
    /// for space.
    pub(crate) fn can_spill(&self) -> bool {
        self.0.pages.store.is_some()
    }
}

impl Pages {
    /// Stores the object of an incoming page, if it needs one, and returns the new word for the
    /// slot. The caller publishes the word.
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

    /// Returns the compression algorithm for newly written pages.
    pub(crate) fn comp_algorithm(&self) -> Algorithm {
        self.0.pages.codecs.primary().algorithm()
    }

    /// Returns a priority whose algorithm can decompress objects of `algorithm` with this
    /// dictionary, preferably the same algorithm; `None` if there is no such priority.
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

    /// Sets compression streams with a trained dictionary for automatic recompression, if it is on
    /// and has none yet, and the family has no devices.
    pub(crate) fn adopt_trained<E>(
        &self,
        learned: impl FnOnce() -> std::result::Result<Arc<Streams>, E>,
    ) -> std::result::Result<(), E> {
        // No training can be in progress: it starts only when pages exist.
        let has_none = self.0.auto.is_on() && self.0.pages.codecs.get(PRIORITIES).is_none();
        if has_none && self.0.pages.layers.all().is_empty() {
            // Streams that were set meanwhile take precedence.
            let _ = self.0.pages.codecs.set(PRIORITIES, learned()?);
        }
        Ok(())
    }
}

/// Returns the content of a dictionary: dictionaries are compared by content.
fn dictionary_bytes(dictionary: Option<&Dictionary>) -> Option<&[u8]> {
    dictionary.map(Dictionary::bytes)
}
