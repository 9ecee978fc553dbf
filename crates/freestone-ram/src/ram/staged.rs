//! Devices whose content is in a file until it is loaded: an empty slot reads from there.
//!
//! # End of loading
//! The loader stores the pages in empty slots ([`Loader::put`]; concurrent writes win). Until all
//! are loaded, the device marks emptied pages with zero pages, as over a base, so an empty slot
//! always means the file's page. At the end the loader waits for the pins of threads that may have
//! seen a slot empty; afterwards no thread looks at the file, and it is closed. A thread that
//! looked while pinned and reads later holds its own reference.
//!
//! A chain has one loader, so no page is stored that was already loaded and then discarded.

use std::sync::{Arc, Weak};

use super::chain::Chain;
use super::config::{ForkConfig, SetupError, round_size};
use super::export::Lower;
use super::layer::Layer;
use super::pages::Pages;
use super::parent::{Base, Parent, Staged, StagedSource};
use super::source::{self, Incoming, Source};
use super::{BELOW_DEPTH_MAX, Family, Inner, Ram, retire};
use freestone_core::device::{Error, Result};
use freestone_core::pin::{self, Swap};

/// Loads the pages of a source into memory. A chain has one loader.
pub(crate) struct Loader {
    /// Weak: the end of a family must not wait for the loader.
    pages: Weak<Pages>,
    chain: Arc<Chain>,
    origin: Arc<Layer>,
    device: Weak<Inner>,
    source: Arc<Swap<Option<StagedSource>>>,
}

impl Loader {
    /// Returns true if a device still needs the pages.
    pub fn is_wanted(&self) -> bool {
        self.pages.strong_count() > 0 && self.chain.is_wanted()
    }

    /// Stores a page, unless the slot was written meanwhile.
    ///
    /// # Errors
    /// Fails if memory is short, under the limit or in the machine: [`Error::NoSpace`],
    /// [`Error::NoMemory`].
    pub fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        let Some(pages) = self.pages.upgrade() else { return Err(Error::Gone) };
        let new = pages.word_of(&self.origin, page, incoming)?;
        let put = pin::pinned(|pin| self.chain.supply(&*pages, pin, page, new));
        if put != Ok(true) {
            pages.release(new);
        }
        put.map(drop)
    }

    /// Frees retired memory, or wakes the keeper, when memory is short.
    pub fn request_space(&self) {
        if let Some(pages) = self.pages.upgrade()
            && !pages.free_leaf_or_yield()
        {
            pages.keeper.kick();
        }
    }

    /// Ends the loading when all pages are in memory, and releases the source.
    pub fn finish(&self) {
        // Wait for threads that saw a slot empty before it was filled ...
        let here = pin::pinned(|pin| self.source.load(pin).clone());
        self.source.replace(Box::new(here));
        // ... and detach the file: later readers find no empty slot.
        self.source.replace(Box::new(None));
        if let Some(device) = self.device.upgrade() {
            device.update_plain();
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if let Some(origin) = self.chain.end_supply()
            && let Some(pages) = self.pages.upgrade()
        {
            retire::retire_layer(&pages, origin);
        }
    }
}

impl Family {
    /// Creates an empty device of `size` bytes over `below` that reads missing pages from a source,
    /// and the loader of these pages.
    ///
    /// # Errors
    /// As [`ram`](Self::ram) and [`fork`](Self::fork); also if no thread can be started to read the
    /// source.
    pub(crate) fn staged(
        &self,
        size: u64,
        below: Lower,
        source: Arc<dyn Source>,
    ) -> std::result::Result<(Ram, Loader), SetupError> {
        source::start_reads()?;
        let pages = &self.0.pages;
        // Reads of the source may have to wait.
        pages.keeper.start().map_err(SetupError::Thread)?;
        let (below, least) = match below {
            Lower::Nothing => (Parent::Nothing, 0),
            Lower::Device(device) => {
                let geometry = device.geometry();
                if !geometry.read_only {
                    return Err(SetupError::Live);
                }
                if geometry.zones.is_some() {
                    return Err(SetupError::ZonedBase);
                }
                pages.keeper.start_over_base().map_err(SetupError::Thread)?;
                (Parent::Device(Base::new(device)), geometry.size)
            }
            Lower::Snapshot(ram) => {
                let size = ram.0.size();
                (Parent::Snapshot(ram), size)
            }
        };
        if below.depth() > BELOW_DEPTH_MAX {
            return Err(SetupError::TooDeep);
        }
        let is_disk = matches!(below, Parent::Nothing);
        let staged = Arc::new(Staged::new(source, pages, size, below));
        let parent = Parent::Staged(Arc::clone(&staged));
        let ram = if is_disk {
            Ram::make(&self.0, round_size(size)?, parent, Arc::default())?
        } else {
            self.0.fork(parent, least, &ForkConfig { size: Some(size), ..ForkConfig::default() })?
        };
        let chain = ram.0.chain.get();
        chain.begin_supply();
        let loader = Loader {
            pages: Arc::downgrade(pages),
            origin: chain.origin(),
            chain,
            device: Arc::downgrade(&ram.0),
            source: Arc::clone(&staged.source),
        };
        Ok((ram, loader))
    }
}
