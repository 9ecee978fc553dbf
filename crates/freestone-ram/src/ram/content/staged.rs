//! Devices whose content is in a file (the source) until it is loaded into memory: an empty slot
//! reads from the file.
//!
//! # End of loading
//! The loader stores the file's pages in empty slots ([`Loader::put`]; concurrent writes take
//! precedence). Until all pages are loaded, the device stores emptied pages as zero pages, as a
//! fork does over its base. An empty slot therefore always means the file's page. At the end the
//! loader waits for the pins of threads that may have seen a slot empty. Afterwards no thread looks
//! for pages in the file, and the file is closed. A thread that found a page while pinned and reads
//! it later holds its own reference to the file.
//!
//! A chain has one loader, so no page is loaded a second time after it was loaded and discarded.

use std::sync::{Arc, Weak};

use super::export::ParentDevice;
use crate::ram::device::chain::Chain;
use crate::ram::device::parent::{BELOW_DEPTH_MAX, Base, Parent, Staged, StagedSource};
use crate::ram::device::retire;
use crate::ram::device::source::{self, Incoming, Source};
use crate::ram::device::{Inner, Ram};
use crate::ram::family::Family;
use crate::ram::memory::config::{ForkConfig, SetupError, round_size};
use crate::ram::memory::layer::Layer;
use crate::ram::memory::pages::Pages;
use freestone_core::device::{Error, Result};
use freestone_core::pin::{self, Swap};

/// Loads the pages of a source into memory. A chain (a device and its snapshots) has one loader.
pub struct Loader {
    /// Weak: a family that is dropped must not wait for the loader.
    pages: Weak<Pages>,
    chain: Arc<Chain>,
    origin: Arc<Layer>,
    device: Weak<Inner>,
    source: Arc<Swap<Option<StagedSource>>>,
}

impl Loader {
    /// Returns true if a device or snapshot still reads the source's pages.
    pub fn is_wanted(&self) -> bool {
        self.pages.strong_count() > 0 && self.chain.is_wanted()
    }

    /// Stores a page of the source, unless the slot was written meanwhile.
    ///
    /// # Errors
    /// Fails if the memory limit leaves no space ([`Error::NoSpace`]), the system has no memory
    /// ([`Error::NoMemory`]), or the family was dropped ([`Error::Gone`]).
    pub fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        let Some(pages) = self.pages.upgrade() else { return Err(Error::Gone) };
        let new = pages.word_of(&self.origin, page, incoming)?;
        let put = pin::pinned(|pin| self.chain.supply(&*pages, pin, page, new));
        if put != Ok(true) {
            pages.release(new);
        }
        put.map(drop)
    }

    /// Frees memory of retired layers or, if there is none, wakes the keeper to evict pages. For
    /// callers whose [`put`](Self::put) found no space.
    pub fn request_space(&self) {
        if let Some(pages) = self.pages.upgrade()
            && !pages.free_leaf_or_yield()
        {
            pages.keeper.kick();
        }
    }

    /// Ends the loading and releases the source. All pages must be in memory.
    pub fn finish(&self) {
        // A replacement waits for pins: wait for threads that saw a slot empty before it was filled
        // ...
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

/// See [`RestoreInto::staged`](super::import::RestoreInto::staged).
pub(super) fn make(
    family: &Family,
    size: u64,
    below: ParentDevice,
    source: Arc<dyn Source>,
) -> std::result::Result<(Ram, Loader), SetupError> {
    source::start_reads()?;
    let pages = &family.0.pages;
    // Reads of the source may wait for a disk, and continue on the work queue.
    pages.keeper.start().map_err(SetupError::Thread)?;
    let (below, least) = match below {
        ParentDevice::Nothing => (Parent::Nothing, 0),
        ParentDevice::Device(device) => {
            let geometry = device.geometry();
            if !geometry.read_only {
                return Err(SetupError::WritableBase);
            }
            if geometry.zones.is_some() {
                return Err(SetupError::ZonedBase);
            }
            pages.keeper.start_over_base().map_err(SetupError::Thread)?;
            (Parent::Device(Base::new(device)), geometry.size)
        }
        ParentDevice::Snapshot(ram) => {
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
        Ram::make(&family.0, round_size(size)?, parent, Arc::default())?
    } else {
        family.0.fork(parent, least, &ForkConfig { size: Some(size), ..ForkConfig::default() })?
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
