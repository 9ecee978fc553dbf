//! Devices whose content lies in a file until it is loaded: an empty slot is read from there.
//!
//! # How it ends
//! The loader puts page after page into slots that are empty ([`Loader::put`]; writers win), and
//! until all are there, the device covers what it empties with zeroes, as over a base. So an empty
//! slot is the file's page. When all are there, the loader waits for the pins of those who may have
//! seen a slot empty before; from then on nobody looks at the file any more, and then it is let go.
//! Who has looked while pinned, and reads it afterwards, has a hold of his own.
//!
//! There is one loader for a chain, so none puts a page that was loaded and discarded since.

use std::sync::{Arc, Weak};

use super::chain::Chain;
use super::config::{ForkConfig, SetupError, round_size};
use super::export::Lower;
use super::layer::Layer;
use super::pages::Pages;
use super::parent::{Base, Here, Parent, Staged};
use super::source::{self, Incoming, Source};
use super::{BELOW_DEPTH_MAX, Family, Inner, Ram, retire};
use freestone_core::device::{Error, Result};
use freestone_core::pin::{self, Swap};

/// Puts the pages of a source into memory. There is one for a chain.
pub(crate) struct Loader {
    /// Weak: who gives a family back does not wait for this.
    pages: Weak<Pages>,
    chain: Arc<Chain>,
    origin: Arc<Layer>,
    device: Weak<Inner>,
    here: Arc<Swap<Option<Here>>>,
}

impl Loader {
    /// Whether a device still reads what is put.
    pub fn is_wanted(&self) -> bool {
        self.pages.strong_count() > 0 && self.chain.is_wanted()
    }

    /// Puts a page in, unless somebody has written there.
    ///
    /// # Errors
    /// No memory for it, below the limit or at all: [`Error::NoSpace`], [`Error::NoMemory`].
    pub fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        let Some(pages) = self.pages.upgrade() else { return Err(Error::Gone) };
        let new = pages.word_of(&self.origin, page, incoming)?;
        let put = pin::pinned(|pin| self.chain.supply(&*pages, pin, page, new));
        if put != Ok(true) {
            pages.release(new);
        }
        put.map(drop)
    }

    /// Memory is short: whoever can make room is told.
    pub fn ask_for_room(&self) {
        if let Some(pages) = self.pages.upgrade()
            && !pages.help_to_free()
        {
            pages.keeper.kick();
        }
    }

    /// All pages are there: the source is let go.
    pub fn finish(&self) {
        // Whoever saw a slot empty before it was filled is waited for ...
        let here = pin::pinned(|pin| self.here.load(pin).clone());
        self.here.replace(Box::new(here));
        // ... and those who come now see none that is.
        self.here.replace(Box::new(None));
        if let Some(device) = self.device.upgrade() {
            device.look_if_plain();
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if let Some(origin) = self.chain.end_supply()
            && let Some(pages) = self.pages.upgrade()
        {
            retire::layer(&pages, origin);
        }
    }
}

impl Family {
    /// An empty device of so many bytes over something, which reads from a source what it does not
    /// hold; and who loads it.
    ///
    /// # Errors
    /// As [`ram`](Self::ram) and [`fork`](Self::fork). No thread to read the source.
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
            here: Arc::clone(&staged.here),
        };
        Ok((ram, loader))
    }
}
