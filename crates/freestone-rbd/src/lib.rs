//! Ceph RBD images as devices.
//!
//! [`Rbd`] uses librbd, which is loaded when the first image is opened. Building needs nothing of
//! Ceph, and a machine that opens no image does not need the library. Requests and their buffers
//! are passed to the library and complete when it calls back; `try_io` never performs I/O, as it
//! would wait for the cluster.
//!
//! **Deadlines.** Ceph waits forever for an unreachable OSD. The library is configured to give up
//! after [`Config::timeout`]. If it does not call back in that time, the request fails with
//! [`Error::Media`](freestone_core::device::Error::Media); the library keeps the buffer until it
//! calls back. A failed write may still be applied later, but before any later write to the same
//! range.
//!
//! **Durability.** The library's cache is off, so completed writes are in the cluster. Flushes are
//! passed on nevertheless, and a FUA write is a write followed by a flush.

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
