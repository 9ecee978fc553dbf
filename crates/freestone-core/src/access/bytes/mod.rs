//! Byte-granular access to a block device.
//!
//! [`Bytes`] gives one user any offset and length on a device. Requests for whole blocks are passed to the
//! device unchanged. A read of partial blocks reads the whole blocks. A write to a partial block reads the
//! block, modifies it and writes it back; meanwhile no other user of [`Bytes`] on the device writes that
//! block (`range_locks.rs`). A discard skips partial blocks.
//!
//! All requests to a zoned device are passed on unchanged, because its writes are whole blocks at the write
//! pointer.
//!
//! [`Bytes`] is not a [`Device`](crate::device::Device): it belongs to one user, and whole blocks keep the
//! inline path of the device under this layer.
//!
//! # Execution
//! * A tried request completes at once, or returns `WouldBlock`.
//! * A submitted request with partial blocks runs piece by piece (chain.rs): each completion passes its
//!   outcome to a thread of the process, which starts the next piece. A piece holds only the range that it
//!   writes, so requests cannot deadlock.
//! * After the user is dropped no further piece starts. So after a simulated power loss, for example, no
//!   earlier request reaches the device.

#[cfg(not(loom))]
mod chain;
#[cfg(all(loom, test))]
mod models;
#[cfg(not(loom))]
mod pieces;
mod range_locks;
#[cfg(not(loom))]
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use user::Bytes;

#[cfg(not(loom))]
mod user;
