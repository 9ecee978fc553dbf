//! A vhost-user-blk backend for Freestone devices, after QEMU's vhost-user protocol and the VIRTIO
//! standard. A virtual machine, or a program with a virtio driver, shares its memory and submits
//! requests through queues in that memory. Most requests need no system call.
//!
//! An [`Export`] is one device at one Unix socket. One thread handles the frontend's messages. Each
//! enabled queue has its own thread, which tries every request inline, submits requests that would
//! block, and passes expensive ones to [`Workers`](freestone_core::workers::Workers).
//!
//! # Trust
//! Neither the frontend nor the driver is trusted. Descriptors, headers and data are copied before
//! use, and only the lengths in the copies are used. A chain has at most [`MAX_CHAIN`] descriptors
//! and a request at most [`MAX_REQUEST_BYTES`] of data. Memory is charged to a budget before it is
//! allocated. A queue ends if its driver violates the protocol. A connection ends if its frontend
//! truncates the memory file.
//!
//! # Why not rust-vmm
//! Rings and copies are the hot path, and must survive memory that disappears. The rest of the
//! protocol is a few fixed-size messages, which take less code than an integration of the rust-vmm
//! crates. The message handler of the rust-vmm crates owns the event loop, and their memory
//! accesses end the process on SIGBUS.
//!
//! # Not supported
//! Packed rings; dirty-page logging, and therefore live migration.

mod channel;
mod disk;
mod export;
mod frontend;
mod inflight;
mod memory;
mod queue;
mod ring;
mod session;
mod sigbus;
mod task;
#[cfg(test)]
mod tests;
mod vring;
mod wire;
mod zones;

pub use disk::{MAX_QUEUES, MAX_REQUEST_BYTES};
pub use export::{Export, FrontendHold, ListenError, Options, PLACE_WAIT, SHUTDOWN_GRACE, serve_socket};
pub use ring::MAX_CHAIN;
