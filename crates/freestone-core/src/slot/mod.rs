//! Page tables: one lockable 64-bit slot for each page, in leaves under directories.
//!
//! Reading order: `word` (the bits, and the [lock](crate::word_lock) among them), `flight` (slots whose content is
//! being read from disk), `nodes` and `table` (the tree that contains the words), [`chain`] (words that move
//! from one table to another).
//!
//! Lock order: a thread holds at most one slot lock, unless a type that owns several tables defines an order
//! among them. The pool's locks come after a slot lock. A thread that holds a slot lock never waits for
//! another request's I/O.

pub mod chain;
mod flight;
mod nodes;
mod root;
mod table;
mod word;

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

pub use flight::{FlightResult, Flights};
pub use table::{Common, LEAF_SLOTS, Leaf, MAX_SLOTS, Table};
#[cfg(loom)]
pub use word::lock;
pub use word::{AGES, Kind, LOCATION_BITS, SlotGuard, Word};
