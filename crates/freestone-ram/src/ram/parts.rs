//! The shared parts of a family.

use std::sync::Arc;

use super::auto_recompress::AutoRecompress;
use super::config::{Config, SetupError};
use super::evict_rounds::Evict;
use super::fault_in::FaultIn;
use super::limits::{Guarantees, Limits};
use super::pages::Pages;

pub(super) struct FamilyParts {
    pub pages: Arc<Pages>,
    pub fault_in: Arc<FaultIn>,
    pub evict: Evict,
    pub auto: AutoRecompress,
    pub guarantees: Guarantees,
    /// The settings at creation; `mem_limit` may have changed since.
    pub config: Config,
}

impl FamilyParts {
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

    /// Sets a device's cap (0: no cap) and guarantee.
    ///
    /// # Errors
    /// As [`Guarantees::set`].
    pub fn set_device_limits(&self, limits: &Arc<Limits>, cap: u64, least: u64) -> Result<(), SetupError> {
        if cap > 0 {
            self.pages.full.set_has_caps();
        }
        self.guarantees.set(limits, cap, least, || self.pages.mem_limit())
    }
}

impl Drop for FamilyParts {
    fn drop(&mut self) {
        self.pages.keeper.stop();
    }
}
