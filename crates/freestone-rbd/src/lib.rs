//! Ceph RBD images as devices.
//!
//! [`Rbd`] uses librbd, which is loaded when the first image is opened. Building this crate needs
//! no Ceph packages, and a machine that opens no image does not need librbd. Requests and their
//! buffers are passed to librbd and complete when librbd calls back. `try_io` never performs I/O,
//! because it would block on the cluster.
//!
//! **Deadlines.** Ceph waits forever for an unreachable OSD, so librbd is configured to give up
//! after [`Config::timeout`]. If librbd does not call back in that time, the request fails with
//! [`Error::Media`](freestone_core::device::Error::Media), and librbd keeps the buffer until it
//! calls back. A failed write may still be applied later, but before any later write to the same
//! range.
//!
//! **Durability.** librbd's cache is off, so completed writes are in the cluster. Flushes are
//! passed to librbd nevertheless, and a FUA write is a write followed by a flush.

mod config;
mod device;
mod error;
mod extents;
mod job;
mod librbd;
mod shared;
mod worker;

pub use config::{Config, DEFAULT_TIMEOUT, ImageName, MAX_TIMEOUT, MIN_TIMEOUT};
pub use device::Rbd;
pub use error::{Errno, SetupError};
