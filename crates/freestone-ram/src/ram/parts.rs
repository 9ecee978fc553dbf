//! The shared parts of a family (devices that share a memory pool).

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
    /// Settings at creation of the family. The current `mem_limit` and full policy are in `pages`.
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

    /// Sets a device's own memory limit `cap` (0: no limit) and its guaranteed memory `least`, both
    /// in bytes.
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
