//! Images in Ceph's RBD as devices.
//!
//! [`Rbd`] does its requests with librbd, which is loaded when the first image is opened: nothing of Ceph
//! is needed to build this, and a machine that opens no image need not have it. Requests are handed to
//! the library with their buffers, and answered when it calls back; a try never waits for it.
//!
//! **Deadlines.** Ceph waits for ever for an OSD that is away. Here the library is told to give up after
//! [`Config::timeout`], and a request that it does not answer for so long fails with
//! [`Error::Media`](freestone_core::device::Error::Media) all the same; its buffer is kept for the library
//! until that calls back. A write that failed so may still be carried out, before any later one to the
//! same place.
//!
//! **Durability.** The library's cache is off, so what was answered is in the cluster; a flush is passed on
//! all the same, and a write that is to be durable is a write and a flush.

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
