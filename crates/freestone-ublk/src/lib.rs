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
//! when they are first used, and lose it after a second without requests.
//!
//! With zones the server copies by itself (user copy), as an append is answered with the place it went
//! to where else the buffer is. Copies are entries of the queue's ring: that of a write's data comes
//! before the request, that of a read's goes with its answer. The kernel does them while it takes the
//! entries, so writes begin in the order in which they came, and there are two system calls where
//! there was one: one for the data of all writes that have arrived, one for all answers.
//!
//! # Zones
//! The kernel asks for a report when the block device begins, and after a write that failed. Reports
//! and operations on zones may wait for the device below: each queue has a thread for them.
//!
//! # What is trusted
//! The kernel: it decides what is copied where. Its descriptors are copied before they are looked
//! at, and checked as those of any client; what it does not offer is asked for by feature bits.
//! Nothing waits for it without an end, but threads nobody waits for.
//!
//! # Users without privileges
//! Who has no `CAP_SYS_ADMIN` makes devices of his own kind. The kernel lets nobody but him, and root,
//! open them, and looks for what commands may do at the node of the character device. So somebody has
//! to give the nodes to him: udev, which asks [`owner`].
//!
//! # Where memory is short
//! The kernel frees memory by writing to disks, and a thread that asks for some may be made to wait
//! for that. If the disk is an export, and its server the thread, nothing goes on. So every thread
//! that has a part in a request has to be an I/O flusher (`PR_SET_IO_FLUSHER`). Those of exports are;
//! devices' own are where whoever made them was, since threads inherit it: a program does it first of
//! all, when it has one thread.
//!
//! # When it ends
//! The block device goes when its requests are done. What the device has not answered in time is
//! answered with an error in its place: else whoever uses the block device would hang with it, and
//! the driver as well. When the process is killed the kernel does the same; the empty device that
//! stays is removed by [`remove_left_behind`].
//!
//! # Not offered
//! Recovery: a successor that takes over a block device in use. Zones for users without privileges.
//! Write zeroes to zones. Zero copy, with which a server cannot see the data.

mod abi;
mod aside;
#[cfg(test)]
mod conformance;
mod control;
mod export;
#[cfg(test)]
mod fake;
mod keeper;
mod kernel;
mod ours;
mod owner;
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
mod zones;
#[cfg(test)]
mod zones_tests;

pub use control::ControlError;
pub use export::{
    END_GRACE, Export, Held, InUse, MAX_DEPTH, MAX_QUEUES, MAX_REQUEST_BYTES, Options, REMOVE_GRACE,
    ResizeError,
};
pub use keeper::{START_DEADLINE, StartError};
pub use ours::LeftBehindError;
pub use owner::OwnerError;
pub use zones::UnfitZones;

/// Removes the devices that a process of ours has left when it was killed, which nobody uses. Those
/// of other programs, and those that are served, stay. Returns the numbers of what was removed.
///
/// # Errors
/// See [`LeftBehindError`].
pub fn remove_left_behind() -> Result<Vec<u32>, LeftBehindError> {
    ours::remove(system::System::default())
}

/// User and group whose the device is that has the node `name`: `ublkcN`, `ublkbN`, or a partition of
/// that. `None`: it is root's.
///
/// # Errors
/// See [`OwnerError`].
pub fn owner(name: &str) -> Result<Option<(u32, u32)>, OwnerError> {
    owner::owner(&system::System::default(), name)
}
