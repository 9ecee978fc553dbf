//! Shared building blocks of all Freestone crates.
//!
//! * [`device`]: the block device interface between devices and exports. Devices do not know exports, and
//!   exports do not know device types.
//! * [`pin`], [`freeze_gate`], [`parking`], [`percpu`], [`per_cpu_arc`], [`consistency_group`]:
//!   synchronisation between requests and changes of a whole device (snapshot, resize) without a per-device
//!   lock.
//! * [`slot`]: the page table of a device, one lockable 64-bit slot for each page; [`arena`]: the memory that
//!   slots point to.
//! * [`overlap`]: ordering of overlapping requests.
//! * [`bytes`]: byte-granular access (any offset and length) to a block device.
//! * [`work_queue`], [`timer`], [`handoff`]: threads that continue requests after a lower device has
//!   completed its part.
//! * [`plug`]: batches of requests or completions; [`completion_queue`]: the completion queue of a thread
//!   that reads requests; [`eventfd`]: the wake-up of that thread.
//! * [`concurrency_limit`]: semaphore-like limits on concurrent users.
//! * [`budget`]: limits on the bytes in flight.
//! * [`workers`]: threads that help a queue's reader.
//! * [`limits`]: limits on requests and bytes per second.
//! * [`log_limit`]: rate-limited log lines.
//! * [`mapped_buffer`], [`stack`]: allocations whose pages can be returned to the kernel.
//! * [`replace`], [`file_locks`], [`unix_socket`]: atomic file replacement, and locks against other
//!   processes; [`fail_points`]: system calls that tests make fail.
//! * [`file_size_limit`], [`descriptor_reserve`]: `RLIMIT_FSIZE` and `RLIMIT_NOFILE`.
//! * [`allow`]: allow lists of clients.
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

#[cfg(not(loom))]
pub mod allow;
#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod budget;
pub mod bytes;
#[cfg(not(loom))]
pub mod completion_queue;
#[cfg(not(loom))]
pub mod concurrency_limit;
#[cfg(not(loom))]
pub mod consistency_group;
#[cfg(not(loom))]
pub mod descriptor_reserve;
pub mod device;
#[cfg(not(loom))]
pub mod eventfd;
#[cfg(not(loom))]
pub mod fail_points;
#[cfg(not(loom))]
pub mod file_locks;
#[cfg(not(loom))]
pub mod file_size_limit;
#[cfg(not(loom))]
pub mod freeze_gate;
#[cfg(not(loom))]
pub mod handoff;
pub mod held_requests;
pub mod limits;
#[cfg(not(loom))]
pub mod log_limit;
#[cfg(not(loom))]
pub mod mapped_buffer;
pub mod mutants;
#[cfg(not(loom))]
pub mod overlap;
pub mod parking;
#[cfg(not(loom))]
pub mod per_cpu_arc;
#[cfg(not(loom))]
pub mod percpu;
pub mod pin;
#[cfg(not(loom))]
pub mod plug;
#[cfg(not(loom))]
pub mod replace;
pub mod slot;
#[cfg(not(loom))]
pub mod stack;
pub mod sync;
#[cfg(not(loom))]
pub mod timer;
#[cfg(not(loom))]
pub mod unique;
#[cfg(not(loom))]
pub mod unix_socket;
pub mod word_lock;
#[cfg(not(loom))]
pub mod work_queue;
pub mod workers;
pub mod zeroes;

#[cfg(loom)]
pub mod percpu {
    //! In a loom model there is one CPU.

    /// Returns the number of CPUs.
    pub const fn cpus() -> usize {
        1
    }
    /// Returns the number of the calling thread's CPU.
    pub const fn current() -> usize {
        0
    }
}

#[cfg(loom)]
pub mod plug {
    //! In a loom model no thread has a plug.

    /// Does nothing.
    pub const fn flush() {}
}
