//! Storing of pages and devices that are restored.

use std::sync::Arc;

use super::export::ParentDevice;
use super::staged::{self, Loader};
use crate::codec::{Algorithm, Dictionary, PRIORITIES, Streams};
use crate::ram::device::Ram;
use crate::ram::device::source::{Incoming, Source};
use crate::ram::family::Family;
use crate::ram::geometry::PAGE;
use crate::ram::memory::config::SetupError;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Error, Flags, Result};
use freestone_core::pin;
use freestone_core::slot::{Kind, Word};

/// Storing of pages in a device that is restored.
pub trait StorePages {
    /// Stores a page in the device. The old content moves to the snapshot that needs it, as with a
    /// write.
    ///
    /// # Errors
    /// Fails if the memory limit leaves no space ([`Error::NoSpace`]), or the system has no memory
    /// ([`Error::NoMemory`]).
    fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()>;

    /// Stores a page as [`put`](Self::put) does. If the memory limit leaves no space and the family
    /// has a backing device, writes the page as a request, which waits for evictions.
    fn put_or_wait(&self, page: u64, incoming: Incoming<'_>) -> Result<()>;
}

/// Codecs and devices of a family into which devices are restored.
pub trait RestoreInto {
    /// Returns the compression algorithm for newly written pages.
    fn comp_algorithm(&self) -> Algorithm;

    /// Returns a priority whose algorithm can decompress objects of `algorithm` with this
    /// dictionary, preferably the same algorithm; `None` if there is no such priority.
    fn priority_to_read(&self, algorithm: Algorithm, dictionary: Option<&Dictionary>) -> Option<u8>;

    /// Sets compression streams with a trained dictionary for automatic recompression, if it is on
    /// and has none yet, and the family has no devices.
    fn adopt_trained<E>(
        &self,
        learned: impl FnOnce() -> std::result::Result<Arc<Streams>, E>,
    ) -> std::result::Result<(), E>;

    /// Creates an empty device of `size` bytes whose empty slots read from a source, or from
    /// `below` if the source does not have the page. Returns the device and the loader of the
    /// source's pages.
    ///
    /// # Errors
    /// As [`Family::ram`] and [`Family::fork`]; also if no thread can be started to read the
    /// source.
    fn staged(
        &self,
        size: u64,
        below: ParentDevice,
        source: Arc<dyn Source>,
    ) -> std::result::Result<(Ram, Loader), SetupError>;
}

impl StorePages for Ram {
    fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
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

    fn put_or_wait(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        match self.put(page, incoming) {
            Err(Error::NoSpace) if self.0.pages.store.is_some() => {
                let mut content = [0; PAGE_BYTES];
                self.0.pages.content(incoming, &mut content)?;
                let at = page * PAGE;
                let bytes = (self.0.size() - at).min(PAGE) as usize;
                self.write_at(at, &content[..bytes], Flags::empty())
            }
            put => put,
        }
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

impl RestoreInto for Family {
    fn comp_algorithm(&self) -> Algorithm {
        self.0.pages.codecs.primary().algorithm()
    }

    fn priority_to_read(&self, algorithm: Algorithm, dictionary: Option<&Dictionary>) -> Option<u8> {
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

    fn adopt_trained<E>(
        &self,
        learned: impl FnOnce() -> std::result::Result<Arc<Streams>, E>,
    ) -> std::result::Result<(), E> {
        // No training can be in progress: it starts only when pages exist.
        let has_none = self.0.auto.is_on() && self.0.pages.codecs.get(PRIORITIES).is_none();
        if has_none && self.0.pages.layers.all().is_empty() {
            let streams = learned()?;
            // Without memory for the dictionary, the family trains one of its own.
            if self.0.auto.store_dictionary(&streams).is_ok() {
                // Streams that were set meanwhile take precedence.
                let _ = self.0.pages.codecs.set(PRIORITIES, streams);
            }
        }
        Ok(())
    }

    fn staged(
        &self,
        size: u64,
        below: ParentDevice,
        source: Arc<dyn Source>,
    ) -> std::result::Result<(Ram, Loader), SetupError> {
        staged::make(self, size, below, source)
    }
}

/// Returns the content of a dictionary: dictionaries are compared by content.
fn dictionary_bytes(dictionary: Option<&Dictionary>) -> Option<&[u8]> {
    dictionary.map(Dictionary::bytes)
}
