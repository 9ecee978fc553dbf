//! The budget of blocks to write (`writeback_limit`).

use freestone_core::sync::Mutex;

/// The budget of blocks to write (`writeback_limit`), which limits the wear of the backing device.
#[derive(Default)]
pub struct Budget {
    state: Mutex<Limit>,
}

/// State of the write budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limit {
    /// True if the budget is enforced.
    pub enabled: bool,
    /// Remaining number of blocks (4 KiB each) that may be written.
    pub left: u64,
    /// Number of changes of the budget. Blocks taken before a change are not refunded after it.
    generation: u64,
}

/// Generation of the budget from which blocks were taken; `None` if the budget was not enforced.
pub type Charge = Option<u64>;

impl Budget {
    pub fn get(&self) -> Limit {
        *self.state.lock()
    }

    pub fn set(&self, change: impl FnOnce(&mut Limit)) {
        let mut limit = self.state.lock();
        change(&mut limit);
        limit.generation += 1;
    }

    /// Takes up to `wanted` blocks from the budget. Returns their number, and the charge for a
    /// refund.
    pub(super) fn take(&self, wanted: u32) -> (u32, Charge) {
        let mut limit = self.state.lock();
        if !limit.enabled {
            return (wanted, None);
        }
        let granted = limit.left.min(u64::from(wanted)) as u32;
        limit.left -= u64::from(granted);
        (granted, Some(limit.generation))
    }

    pub(super) fn refund(&self, blocks: u32, charge: Charge) {
        let mut limit = self.state.lock();
        if charge == Some(limit.generation) {
            limit.left = limit.left.saturating_add(u64::from(blocks));
        }
    }
}
