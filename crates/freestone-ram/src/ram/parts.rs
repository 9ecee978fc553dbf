//! The parts of a family that its devices share.

use std::sync::Arc;

use super::auto_recompress::AutoRecompress;
use super::config::{Config, SetupError};
use super::evict::Evict;
use super::fault_in::FaultIn;
use super::limits::{Guarantees, Limits};
use super::pages::Pages;

/// The parts of a [family](super::family).
pub(super) struct FamilyParts {
    pub pages: Arc<Pages>,
    pub fault_in: Arc<FaultIn>,
    pub evict: Evict,
    pub auto: AutoRecompress,
    pub guarantees: Guarantees,
    /// As it was made; `mem_limit` may have changed.
    pub config: Config,
}

impl FamilyParts {
    /// A family of which nobody knows yet: no thread works for it.
    pub fn new(config: Config) -> Result<Arc<Self>, SetupError> {
        let pages = Pages::new(&config)?;
        Ok(Arc::new(Self {
            fault_in: Arc::new(FaultIn::new(Arc::clone(&pages))),
            evict: Evict::new(Arc::clone(&pages)),
            auto: AutoRecompress::new(Arc::clone(&pages), config.auto_recompress),
            guarantees: Guarantees::default(),
            pages,
            config,
        }))
    }

    /// Sets a device's cap (0 is none) and what is guaranteed to it.
    ///
    /// # Errors
    /// As [`Guarantees::set`].
    pub fn set_device_limits(&self, limits: &Arc<Limits>, cap: u64, least: u64) -> Result<(), SetupError> {
        if cap > 0 {
            self.pages.full.note_cap();
        }
        self.guarantees.set(limits, cap, least, || self.pages.mem_limit())
    }
}

impl Drop for FamilyParts {
    fn drop(&mut self) {
        self.pages.keeper.stop();
    }
}
