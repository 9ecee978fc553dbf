//! What all of Freestone stands on.
//!
//! * [`device`]: the contract between devices and those who use them. Devices know no export,
//!   exports know no device.
//! * [`pin`], [`freeze_gate`], [`parking`], [`percpu`], [`per_cpu_arc`], [`consistency_group`]: how
//!   requests and changes of a whole device get by one another without a lock of the whole device.
//! * [`slot`]: the table of slots, one for each page, with a lock in its word; [`arena`]: the
//!   memory that it points to.
//! * [`overlap`]: requests that overlap, one after the other.
//! * [`bytes`]: any offset and length over a device of blocks.
//! * [`work_queue`], [`timer`], [`handoff`]: who carries on what a device below has answered.
//! * [`plug`]: many requests, or answers, handed over at once; [`answers`]: their way to the thread
//!   that reads a queue; [`eventfd`]: the wake-up of a thread.
//! * [`places`]: how many may use something at one time.
//! * [`budget`]: bytes that may be held for requests.
//! * [`workers`]: who does what one queue's reader cannot do alone.
//! * [`limits`]: how many requests a second get through, and their bytes.
//! * [`log_limit`]: lines of what happens again and again.
//! * [`mapped`], [`stack`]: memory that can be given back while it is kept.
//! * [`replace`], [`file_locks`], [`unix_socket`]: files that are never half written, and never
//!   somebody else's; [`fail_points`]: their system calls, which tests make fail.
//! * [`file_size_limit`], [`descriptor_reserve`]: `RLIMIT_FSIZE` and `RLIMIT_NOFILE`.
//! * [`allow`]: who may connect to an address.
//!
//! Only [`device`] is a promise to users; the rest is for the crates of this workspace and may
//! change with them.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

// Offsets and lengths are cast between u64 and usize all over.
const _: () = assert!(usize::BITS == 64, "Freestone needs a 64-bit machine");

/// Bytes of a page: what one slot of a page table stands for.
pub const PAGE_BYTES: usize = 4096;
/// Bits of a location in a slot's word; memory and backing devices end at 2^36 units of 16 bytes, 1
/// TiB.
pub const LOCATION_BITS: u32 = 36;

#[cfg(not(loom))]
pub mod allow;
#[cfg(not(loom))]
pub mod answers;
#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod budget;
pub mod bytes;
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
pub mod held;
pub mod limits;
#[cfg(not(loom))]
pub mod log_limit;
#[cfg(not(loom))]
pub mod mapped;
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
pub mod places;
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
    //! A model has one CPU.

    /// How many there are.
    pub const fn cpus() -> usize {
        1
    }
    /// The one that this runs on.
    pub const fn current() -> usize {
        0
    }
}

#[cfg(loom)]
pub mod plug {
    //! In a model no thread has a plug.

    /// There is nothing to hand over.
    pub const fn flush() {}
}
