//! Exports Freestone devices as Linux block devices through the kernel's ublk driver.
//!
//! An [`Export`] is one device at `/dev/ublkbN`, usable by file systems, swap and device mapper. Each of its
//! queues has an `io_uring` and a thread. The thread tries every request inline, submits requests that would
//! block, and passes expensive ones to [`Workers`](freestone_core::workers::Workers). One system call both
//! sends completions and fetches new requests. A device thread creates the block device and removes it.
//!
//! # Data path
//! The driver copies the data of a write into the buffer of the request's tag before it delivers the request.
//! It copies read data out of that buffer when the read completes. The device works in the same buffer, so
//! the driver's copy is the only one. The buffer of a tag has the size of the largest request. The kernel
//! allocates the pages of a buffer on first use, and the queue frees them after one second without requests.
//!
//! Zoned devices use ublk's user copy, because the completion of an append carries the written sector in the
//! field of the buffer address. The copies are entries of the queue's ring. A write's data is fetched before
//! the request begins; a read's data is sent together with its completion. The kernel copies while it
//! consumes the entries, so writes begin in the order of arrival. User copy needs two system calls per batch:
//! one fetches the data of all writes that arrived, and one sends all completions.
//!
//! # Zones
//! The kernel requests a zone report when the block device starts, and after a failed write.
//! Reports and zone operations may block in the underlying device, so each queue has a separate
//! thread for them.
//!
//! # Trust
//! The kernel is trusted: it decides which memory is copied. Descriptors are still copied before use and
//! checked like requests of any client. Feature bits show what the driver supports. Kernel calls without a
//! timeout run only on threads that no other thread waits for.
//!
//! # Unprivileged users
//! A process without `CAP_SYS_ADMIN` creates unprivileged devices. The kernel allows only the owner and root
//! to open these, and checks permissions on the node of the character device. udev must therefore give the
//! nodes to the owner; its rule queries the owner, see [`device_owner`].
//!
//! # Memory pressure
//! The kernel reclaims memory by writing to disks, and an allocation may wait for such a write. If
//! the disk is an export and the waiting thread serves it, the two deadlock. Every thread on the
//! request path must therefore be an I/O flusher (`PR_SET_IO_FLUSHER`). Threads of exports set the
//! flag themselves. Threads of devices inherit it from their creator, so a program should set it
//! first, while it has one thread.
//!
//! The block device is removed when its requests are done. Requests that the device has not completed in time
//! fail with an error, since otherwise users of the block device and the driver would hang. The kernel also
//! fails requests if the process is killed. [`remove_stale_devices`] removes the dead device that a killed
//! process leaves.
//!
//! # Recovery
//! With [`Options::recovery`], the block device survives the end of its process without an orderly end. Requests then
//! wait in the kernel. The next server [finds](WaitingDevices) the block device by its [`RecoveryTag`], and serves it
//! again with the same id, number of queues and queue depth. Requests that the former server has not completed
//! arrive again.
//!
//! # Not supported
//! Zones for unprivileged users, recovery of zoned devices and for unprivileged users, write zeroes on zoned
//! devices, and zero copy, which would hide the data from the server.

mod device_thread;
mod export;
#[cfg(test)]
mod fake;
mod format;
mod kernel;
mod owner;
mod queue;
mod recovery;
mod shared;
mod stale_devices;
#[cfg(test)]
mod tests;

pub use device_thread::{START_DEADLINE, StartError};
pub use export::{
    ClaimError, DeviceClaim, Export, InUse, MAX_DEPTH, MAX_QUEUES, MAX_REQUEST_BYTES, Options, REMOVE_GRACE,
    RequestHold, ResizeError, SHUTDOWN_GRACE,
};
pub use format::zones::UnsupportedZones;
pub use kernel::control::ControlError;
pub use owner::OwnerError;
pub use recovery::{Recovery, RecoveryTag, WaitingDevices};
pub use stale_devices::StaleDeviceError;

/// Removes unused devices that killed Freestone processes left behind, and returns their ids. Devices of
/// other programs and devices with a running server are not removed.
pub fn remove_stale_devices() -> Result<Vec<u32>, StaleDeviceError> {
    stale_devices::remove(kernel::system::System::default())
}

/// Returns the user id and group id that own the device with the node `name`: `ublkcN`, `ublkbN`, or a
/// partition of the latter. `None` means that root owns the device.
pub fn device_owner(name: &str) -> Result<Option<(u32, u32)>, OwnerError> {
    owner::device_owner(&kernel::system::System::default(), name)
}
