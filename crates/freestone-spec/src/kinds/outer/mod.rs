//! Kinds whose data lies outside of the server: files, images, and disks of other servers.
//!
//! `kinds` builds devices of this room. The modules use the rest of `kinds`, but not each other.

pub(super) mod file;
pub(super) mod image;
pub(super) mod nbd;
pub(super) mod qcow2;
#[cfg(feature = "rbd")]
pub(super) mod rbd;
