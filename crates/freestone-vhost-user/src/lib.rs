//! A vhost-user-blk backend for Freestone's devices, after QEMU's description of the protocol and
//! the VIRTIO standard: a virtual machine, or a program with a virtio driver, shares its memory
//! and reads and writes a device through queues there, without a system call for most requests.
//!
//! An [`Export`] is one device at one Unix socket. A thread answers the frontend's messages; each
//! queue that is enabled has a thread of its own, which tries every request inline, submits what
//! would block, and hands dear ones to [`Workers`](freestone_core::workers::Workers).
//!
//! # What is trusted
//! Nothing. Descriptors, headers and data are copied before they are looked at; lengths come from
//! the copy. A chain has at most [`MAX_CHAIN`] descriptors, a request [`MAX_REQUEST_BYTES`], and
//! bytes are taken from a budget before they are allocated. A queue whose driver breaks the rules
//! ends; a frontend that cuts off its memory file ends its connection.
//!
//! # Why no crate for it
//! Rings and copies are the hot path, and have to outlive memory that goes away under them. What
//! remains of the protocol, fixed messages of a few numbers, is shorter than what the crates of
//! rust-vmm would need around them: their handler owns the loop, and their memory ends the process
//! on SIGBUS.
//!
//! # Not offered
//! Packed rings; dirty-page logging, and so live migration.

mod channel;
mod disk;
mod export;
mod guest;
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
pub use export::{END_GRACE, Export, Held, ListenError, Options, PLACE_WAIT, serve_here};
pub use ring::MAX_CHAIN;
