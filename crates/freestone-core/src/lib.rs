//! Shared building blocks of all Freestone crates.
//!
//! * [`device`]: the block device interface between devices and exports. Devices do not know exports, and
//!   exports do not know device types.
//! * `locks`: synchronisation between requests and changes of a whole device (snapshot, resize) without a
//!   per-device lock: [`pin`], [`parking`], [`word_lock`], [`percpu`], [`per_cpu_arc`].
//! * `requests`: modules that hold, order, batch and continue requests: [`freeze_gate`], [`consistency_group`],
//!   [`held_requests`], [`overlap`], [`plug`], [`work_queue`], [`timer`], [`concurrency_limit`].
//! * [`limits`]: limits on requests and bytes per second.
//! * [`slot`]: the page table of a device, one lockable 64-bit slot for each page.
//! * `memory`: memory that is returned to the kernel: [`arena`], which slots point to, [`mapped_buffer`],
//!   [`stack`].
//! * `access`: calls of a device: [`bytes`] at any offset and length, [`handoff`] to a lower device,
//!   [`zeroes`].
//! * `reader`: the thread that reads requests of a queue: its memory [`budget`], [`completion_queue`] and
//!   [`workers`].
//! * [`exports`]: the life of an export of one device.
//! * `system`: the operating system: [`replace`], [`file_locks`], [`file_size_limit`], [`fail_points`],
//!   [`unix_socket`], [`allow`], [`clock`], [`descriptor_reserve`], [`eventfd`], [`log_limit`], [`unique`].
//!
//! The rooms use one another in one direction: `system` and `locks`; `requests`; [`limits`]; [`device`];
//! `memory` and `reader`; [`slot`], `access` and [`exports`]. [`sync`], [`mutants`], [`kill_points`] and [`trail`] are below
//! all.
//!
//! Only [`device`] is a stable interface. The other modules are internal to this workspace.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

// Offsets and lengths are cast between u64 and usize in many places.
const _: () = assert!(usize::BITS == 64, "Freestone needs a 64-bit machine");

/// Page size in bytes. Each slot refers to one page.
pub const PAGE_BYTES: usize = 4096;
/// Number of bits of the location field of a slot. Limits memory and backing devices to 2^36 units of 16
/// bytes, that is, 1 TiB.
pub const LOCATION_BITS: u32 = 36;

mod access;
pub mod device;
#[cfg(not(loom))]
pub mod exports;
pub mod kill_points;
pub mod limits;
mod locks;
#[cfg(not(loom))]
mod memory;
pub mod mutants;
mod reader;
mod requests;
pub mod slot;
pub mod sync;
#[cfg(not(loom))]
mod system;
pub mod trail;

#[cfg(not(loom))]
pub use access::handoff;
pub use access::{bytes, zeroes};
#[cfg(not(loom))]
pub use locks::per_cpu_arc;
pub use locks::{parking, percpu, pin, word_lock};
#[cfg(not(loom))]
pub use memory::{arena, mapped_buffer, stack};
pub use reader::workers;
#[cfg(not(loom))]
pub use reader::{budget, completion_queue};
#[cfg(not(loom))]
pub use requests::{concurrency_limit, consistency_group, freeze_gate, overlap, timer, work_queue};
pub use requests::{held_requests, plug};
#[cfg(not(loom))]
pub use system::{
    allow, clock, descriptor_reserve, eventfd, fail_points, file_locks, file_size_limit, log_limit, replace,
    unique, unix_socket,
};
