//! Pages out of a snapshot in the form in which they are stored, and into a new device in that
//! form: what [saving](crate::save) needs.
//!
//! What is spilled is read from the backing device and stays there. No slot departs for that, so
//! nobody waits: the page of a snapshot does not change, and the bytes that were read are the
//! page's as long as no block of them began another life meanwhile (its generation tells).

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
use crate::spill::objects::{Near, Spilled};
use crate::spill::store::Store;
use freestone_core::device::{Device, Error, Result};
use freestone_core::pin;
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};
use freestone_core::sync::mpsc;

/// Before another look at a page that is on its way for somebody else.
const PAUSE: Duration = Duration::from_millis(1);

/// What a device lies over.
pub enum Lower {
    /// Zeroes.
    Nothing,
    /// A base.
    Device(Arc<dyn Device>),
    /// A snapshot of the same family, which lies over something itself.
    Snapshot(Ram),
}

/// The form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// One 32-bit pattern; no bytes.
    Same(u32),
    /// One 64-bit pattern; 8 bytes.
    Pattern,
    /// By the algorithm of this priority.
    Compressed(u8),
    Huge,
    /// Nothing, where an older snapshot holds something; no bytes.
    Parent,
    /// The page cannot be read; no bytes.
    Lost {
        /// No other try can read it either.
        for_good: bool,
    },
}

/// A page that was gathered.
struct Item {
    page: u64,
    stored: Stored,
    at: usize,
    len: usize,
}

/// Pages as they are stored.
#[derive(Default)]
pub(crate) struct Gathered {
    items: Vec<Item>,
    data: Vec<u8>,
}

impl Gathered {
    fn clear(&mut self) {
        self.items.clear();
        self.data.clear();
    }

    fn push(&mut self, page: u64, stored: Stored, bytes: &[u8]) {
        self.items.push(Item { page, stored, at: self.data.len(), len: bytes.len() });
        self.data.extend_from_slice(bytes);
    }

    /// The pages, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Stored, &[u8])> {
        self.items.iter().map(|item| (item.page, item.stored, &self.data[item.at..item.at + item.len]))
    }
}

/// A page that is spilled, and which lives its blocks had when its slot said so.
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
    /// Tells devices apart.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// What it lies over; a snapshot, what its origin lay over.
    pub fn lower(&self) -> Lower {
        match self.0.parent.loaded() {
            Parent::Nothing | Parent::Staged(_) => Lower::Nothing,
            Parent::Device(base) => Lower::Device(Arc::clone(&base.device)),
            Parent::Snapshot(ram) => Lower::Snapshot(ram.clone()),
        }
    }

    /// The chain that this snapshot is one of, and its number there: older ones have smaller
    /// numbers.
    pub(crate) fn place_in_chain(&self) -> Option<(usize, u64)> {
        pin::pinned(|pin| match &self.0.view.load(pin).role {
            Role::Snapshot { chain, number } => Some((Arc::as_ptr(chain) as usize, *number)),
            Role::Live { .. } => None,
        })
    }

    /// The layer in which a page lies, by its id; `None`: it lies below.
    fn holder(&self, page: u64) -> Option<u32> {
        pin::pinned(|pin| {
            self.0.view.load(pin).with_page(pin, page, |found| found.map(|(layer, _)| layer.id()))
        })
    }

    /// The next pages, from `page` on, of which this snapshot, or its chain, may hold some: of one
    /// leaf.
    pub(crate) fn next_held(&self, page: u64) -> Option<Range<u64>> {
        let end = self.0.slots();
        // Before the slots are looked at: what is loaded meanwhile is in one of both.
        let here = self.0.parent.here();
        let page = page.min(end);
        let first = page + pin::pinned(|pin| self.0.view.load(pin).run_of_parent(pin, page, end));
        let first = here.and_then(|here| next_in(&*here.source, page, first)).unwrap_or(first);
        (first < end).then(|| first..super::next_multiple(first, LEAF_SLOTS).min(end))
    }

    /// Copies those of these pages that this snapshot or its chain holds, as they are stored; ages
    /// and idle marks stay as they are. With an older snapshot of the chain given, those that
    /// differ `since` then. Pages that cannot be read are [`Stored::Lost`].
    ///
    /// # Errors
    /// There is no memory to read a page; which one.
    pub(crate) fn copy_pages(
        &self,
        pages: Range<u64>,
        since: Option<&Self>,
        into: &mut Gathered,
    ) -> std::result::Result<(), (u64, Error)> {
        // What both find in one place is one page. A page that moves to a younger snapshot between
        // the two looks is taken for another one, which does no harm; what lies in a snapshot
        // before this one never moves to this one or behind it.
        let is_same = |page| since.is_some_and(|older| older.holder(page) == self.holder(page));
        self.copy_all(pages.filter(|&page| !is_same(page)).collect(), since.is_some(), into)
    }

    /// Copies these pages; those of which neither this snapshot nor its chain holds any as
    /// [`Stored::Parent`].
    ///
    /// # Errors
    /// As [`copy_pages`](Self::copy_pages).
    pub(crate) fn copy_changed(
        &self,
        pages: Vec<u64>,
        into: &mut Gathered,
    ) -> std::result::Result<(), (u64, Error)> {
        self.copy_all(pages, true, into)
    }

    fn copy_all(
        &self,
        mut ask: Vec<u64>,
        also_parents: bool,
        into: &mut Gathered,
    ) -> std::result::Result<(), (u64, Error)> {
        into.clear();
        while !ask.is_empty() {
            // Before the slots are looked at: what is loaded meanwhile is in one of both.
            let here = self.0.parent.here();
            let (mut spilled, mut again) = (Vec::new(), Vec::new());
            for page in ask {
                match (self.copy_out(page, into), &here) {
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
                // It lands, if need be because it is late.
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

    /// Takes a page that is not loaded yet.
    fn push_incoming(&self, page: u64, incoming: Incoming<'_>, into: &mut Gathered) {
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

    fn copy_out(&self, page: u64, into: &mut Gathered) -> Found {
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

    /// Reads spilled pages. Those that moved meanwhile are to be looked at `again`.
    fn read_spilled(&self, spilled: Vec<OnDevice>, into: &mut Gathered, again: &mut Vec<u64>) {
        let failed = match &self.0.pages.store {
            Some(store) => {
                let groups = store.near_ones_together(spilled);
                let failed = self.read_groups(store, groups, into, again);
                // One of a group may be to blame.
                let ones =
                    failed.into_iter().flat_map(|found| store.near_ones_together(vec![found])).collect();
                self.read_groups(store, ones, into, again)
            }
            None => spilled,
        };
        for failed in failed {
            into.push(failed.spilled.slot, Stored::Lost { for_good: false }, &[]);
        }
    }

    /// Reads groups of pages side by side; returns those that could not be read.
    fn read_groups(
        &self,
        store: &Arc<Store>,
        groups: Vec<Near<OnDevice>>,
        into: &mut Gathered,
        again: &mut Vec<u64>,
    ) -> Vec<OnDevice> {
        let (answer, answers) = mpsc::channel();
        let mut waiting = Vec::new();
        for (number, group) in groups.into_iter().enumerate() {
            let answer = answer.clone();
            store.read(group.first, group.blocks, move |outcome| {
                // We listen until all have said something.
                let _ = answer.send((number, outcome.map(<[u8]>::to_vec)));
            });
            waiting.push(Some(group));
        }
        drop(answer);
        let mut failed = Vec::new();
        // Each answers, or is answered for when it is late.
        while let Ok((number, outcome)) = answers.recv() {
            let Some(Near { first, of, .. }) = waiting[number].take() else { continue };
            let Ok(buffer) = outcome else {
                failed.extend(of);
                continue;
            };
            for found in of {
                if generations(store, found.spilled.word) != found.generations {
                    again.push(found.spilled.slot);
                } else if let Some(object) = store.object(&found.spilled, first, &buffer) {
                    self.take_spilled(store, &found.spilled, object, into);
                } else {
                    failed.push(found);
                }
            }
        }
        failed.extend(waiting.into_iter().flatten().flat_map(|group| group.of));
        failed
    }

    /// Takes one page that was read.
    fn take_spilled(&self, store: &Store, spilled: &Spilled, object: &[u8], into: &mut Gathered) {
        let &Spilled { slot, word, .. } = spilled;
        let mut scratch = Scratch::new();
        match <&Page>::try_from(object) {
            Err(_) => into.push(slot, Stored::Compressed(word.algorithm() as u8), object),
            Ok(_) if store.is_packed() => into.push(slot, Stored::Huge, object),
            // In the other layout pages lie as they are.
            Ok(content) => match self.0.pages.codecs.primary().compress(content, &mut scratch) {
                Some(object) => into.push(slot, Stored::Compressed(0), object),
                None => into.push(slot, Stored::Huge, content),
            },
        }
    }

    /// The family's algorithm of a priority, and whether the automatic mode made it.
    pub(crate) fn streams<R>(&self, priority: u8, look: impl FnOnce(&Streams, bool) -> R) -> Option<R> {
        let trained = usize::from(priority) == PRIORITIES && self.0.family.auto.is_on();
        self.0.pages.codecs.get(priority.into()).map(|streams| look(streams, trained))
    }
}

/// Which lives of its blocks an object lies in.
fn generations(store: &Store, spilled: Word) -> [u32; 2] {
    let (first, count) = store.blocks_of(spilled);
    let last = first + u64::from(count) - 1;
    [store.map().generation(first), store.map().generation(last)]
}

// ---- in -----------------------------------------------------------------------------------------

impl Ram {
    /// Puts a page in. What was there goes to the snapshots that need it, as with a write.
    ///
    /// # Errors
    /// No memory for it, below the limit or at all.
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

    /// Whether pages leave memory where it is short, so that a write can wait for room.
    pub(crate) fn can_spill(&self) -> bool {
        self.0.pages.store.is_some()
    }
}

impl Pages {
    /// Stores a page that comes from elsewhere for a slot; returns the word that says so.
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
    /// Whether a device is one of this family.
    pub(crate) fn has(&self, ram: &Ram) -> bool {
        Arc::ptr_eq(&self.0, &ram.0.family)
    }

    /// The algorithm that new pages are compressed with.
    pub(crate) fn comp_algorithm(&self) -> Algorithm {
        self.0.pages.codecs.primary().algorithm()
    }

    /// The priority of which the algorithm reads objects of another one as they are; best the same
    /// one.
    pub(crate) fn reads(&self, algorithm: Algorithm, dictionary: Option<&Dictionary>) -> Option<u8> {
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

    /// Gives an automatic mode that has nothing yet, in a family without devices, what another one
    /// has learned.
    pub(crate) fn adopt<E>(
        &self,
        learned: impl FnOnce() -> std::result::Result<Arc<Streams>, E>,
    ) -> std::result::Result<(), E> {
        // Nobody trains anything before there are pages.
        let has_none = self.0.auto.is_on() && self.0.pages.codecs.get(PRIORITIES).is_none();
        if has_none && self.0.pages.layers.all().is_empty() {
            // It stays with its own where it got any meanwhile.
            let _ = self.0.pages.codecs.set(PRIORITIES, learned()?);
        }
        Ok(())
    }
}

/// A dictionary is what is in it, wherever it came from.
fn dictionary_bytes(dictionary: Option<&Dictionary>) -> Option<&[u8]> {
    dictionary.map(Dictionary::bytes)
}
