//! Slots: one 64-bit word a page, its lock inside, in leaves under a directory.
//!
//! Read in this order: `word` (the bits), `lock` (the lock bit and who waits for it), `flight` (a
//! slot whose content is on its way), `nodes` and `table` (where the words lie), [`chain`] (words
//! that go from one table to another).

pub mod chain;
mod flight;
mod lock;
mod nodes;
mod root;
mod table;
mod word;

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

pub use flight::{Flights, Landed};
pub use lock::SlotGuard;
#[cfg(loom)]
pub use lock::lock;
pub use table::{Common, LEAF_SLOTS, Leaf, MAX_SLOTS, Table};
pub use word::{AGES, Kind, LOCATION_BITS, Word};
