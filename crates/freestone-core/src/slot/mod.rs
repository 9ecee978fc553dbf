//! Page tables: one lockable 64-bit slot for each page, in leaves under directories.
//!
//! Reading order: `word` (the bits), `lock` (the lock bit and its waiters), `flight` (slots whose content is
//! being read from disk), `nodes` and `table` (the tree that contains the words), [`chain`] (words that move
//! from one table to another).

#[cfg(not(loom))]
pub mod adoption;
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

pub use flight::{FlightId, FlightResult, Flights};
pub use lock::SlotGuard;
#[cfg(loom)]
pub use lock::lock;
pub use table::{Common, LEAF_SLOTS, Leaf, MAX_SLOTS, Table};
pub use word::{AGES, Kind, LOCATION_BITS, Word};
