//! Any offset and length over a device of blocks.
//!
//! [`Bytes`] is one user's way to a device. What is whole blocks goes straight on. A read of parts
//! of blocks reads these blocks as a whole; a write of a part of a block reads the block and writes
//! it back, and nobody who comes through [`Bytes`] of the same device writes that block meanwhile
//! (holds.rs). A discard leaves blocks out of which it has a part only.
//!
//! A device with zones is shown as it is: what is written there goes to the write pointer, by whole
//! blocks.
//!
//! # Who does what
//! * A try does it all at once, or would block.
//! * What is submitted goes piece by piece (chain.rs): a completion gives its outcome to a thread
//!   of the process, which begins the next piece. Each piece holds what it writes, and nothing
//!   beside, so none wait for one another.
//! * When the user is dropped nothing more is begun: after a loss of power, say, nothing arrives
//!   that was asked for before it.

#[cfg(not(loom))]
mod chain;
mod holds;
#[cfg(all(loom, test))]
mod models;
#[cfg(not(loom))]
mod pieces;
#[cfg(not(loom))]
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use user::Bytes;

#[cfg(not(loom))]
mod user;
