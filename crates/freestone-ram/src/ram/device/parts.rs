//! The shared parts of a family (devices that share a memory pool).

use std::sync::Arc;

use super::Ram;
use super::flights::FaultIn;
use super::parent::Parent;
use crate::ram::memory::config::{Config, ForkConfig, SetupError, round_fork_size};
use crate::ram::memory::limits::{Guarantees, Limits};
use crate::ram::memory::pages::{Memory, Pages};
use crate::ram::recompress::auto::AutoRecompress;
use crate::ram::recompress::dedup::AutoDedup;
use crate::ram::recompress::groups::AutoGroup;
use crate::ram::spilling::evict_rounds::Evict;

pub(in crate::ram) struct FamilyParts {
    pub pages: Arc<Pages>,
    pub fault_in: Arc<FaultIn>,
    pub evict: Evict,
    pub auto: AutoRecompress,
    pub dedup: AutoDedup,
    pub groups: AutoGroup,
    pub guarantees: Guarantees,
    /// Settings at creation of the family. The current `mem_limit` and full policy are in `pages`.
    pub config: Config,
}

impl FamilyParts {
    pub fn new(config: Config) -> Result<Arc<Self>, SetupError> {
        let memory = Memory::new(&config)?;
        Self::with_memory(config, memory)
    }

    /// Creates the parts of a family whose memory may have content already.
    pub fn with_memory(config: Config, memory: Memory) -> Result<Arc<Self>, SetupError> {
        let pages = Pages::new(&config, memory)?;
        Ok(Arc::new(Self {
            fault_in: Arc::new(FaultIn::new(Arc::clone(&pages))),
            evict: Evict::new(Arc::clone(&pages)),
            auto: AutoRecompress::new(Arc::clone(&pages), config.auto_recompress),
            dedup: AutoDedup::new(Arc::clone(&pages), config.auto_dedup),
            groups: AutoGroup::new(Arc::clone(&pages), config.auto_group),
            guarantees: Guarantees::default(),
            pages,
            config,
        }))
    }

    /// Sets a device's own memory limit `cap` (0: no limit) and its guaranteed memory `least`, both
    /// in bytes.
    pub fn set_device_limits(&self, limits: &Arc<Limits>, cap: u64, least: u64) -> Result<(), SetupError> {
        if cap > 0 {
            self.pages.full.set_has_caps();
        }
        self.guarantees.set(limits, cap, least, || self.pages.mem_limit())
    }
}

impl FamilyParts {
    /// Creates a fork of `parent`, whose size is `base_size`.
    pub fn fork(
        self: &Arc<Self>,
        parent: Parent,
        base_size: u64,
        config: &ForkConfig,
    ) -> Result<Ram, SetupError> {
        freestone_core::trail::step!();
        let size = config.size.unwrap_or(base_size);
        if size < base_size {
            return Err(SetupError::SmallerThanBase { wanted: size, base: base_size });
        }
        let limits = Arc::new(Limits::default());
        self.set_device_limits(&limits, config.mem_limit, config.mem_min)?;
        Ram::make(self, round_fork_size(size)?, parent, limits)
    }
}

impl Drop for FamilyParts {
    fn drop(&mut self) {
        self.pages.keeper.stop();
    }
}
