//! Block devices of Linux for Freestone's devices, by the kernel's ublk driver: all programs of a
//! machine use a device as they use a disk, with file systems, swap and other block devices over it.
//!
//! An [`Export`] is one device at `/dev/ublkbN`. Each of its queues has a ring and a thread, which
//! tries every request inline, submits what would block, and hands dear ones to
//! [`Workers`](freestone_core::workers::Workers). What is done and what has arrived share a system
//! call. Another thread, the keeper, makes the block device and takes it away.
//!
//! # How data moves
//! The driver copies a write's data into the buffer of the request's tag before it tells of it, and a
//! read's data out of there when that is answered. The device works in this buffer, so there is no
//! copy beside the driver's. A tag's buffer is as large as the largest request; its pages get memory
//! when they are first used, and lose it after a second without requests. Copies by the server itself
//! (user copy) are for devices with zones only, where a write is answered with the place it went to;
//! such devices are not shown yet.
//!
//! # What is trusted
//! The kernel: it decides what is copied where. Its descriptors are copied before they are looked
//! at, and checked as those of any client; what it does not offer is asked for by feature bits.
//! Nothing waits for it without an end, but threads nobody waits for.
//!
//! # When it ends
//! The block device goes when its requests are done. What the device has not answered in time is
//! answered with an error in its place: else whoever uses the block device would hang with it, and
//! the driver as well. When the process is killed the kernel does the same; the empty device that
//! stays is removed by [`remove_left_behind`].
//!
//! # Not offered
//! Recovery: a successor that takes over a block device in use. Devices for users without
//! privileges. Zones. Zero copy, with which a server cannot see the data.

mod abi;
#[cfg(test)]
mod conformance;
mod control;
mod export;
#[cfg(test)]
mod fake;
mod keeper;
mod kernel;
mod ours;
mod params;
mod parts;
mod queue;
mod shared;
mod slots;
mod system;
mod task;
#[cfg(test)]
mod tests;
mod uring;
mod within;

pub use control::ControlError;
pub use export::{
    END_GRACE, Export, Held, InUse, MAX_DEPTH, MAX_QUEUES, MAX_REQUEST_BYTES, Options, REMOVE_GRACE,
    ResizeError,
};
pub use keeper::{START_DEADLINE, StartError};
pub use ours::LeftBehindError;

/// Removes the devices that a process of ours has left when it was killed, which nobody uses. Those
/// of other programs, and those that are served, stay. Returns the numbers of what was removed.
///
/// # Errors
/// See [`LeftBehindError`].
pub fn remove_left_behind() -> Result<Vec<u32>, LeftBehindError> {
    ours::remove(system::System::default())
}
