//! Device implementations over image files: raw files and block devices ([`file`](mod@file)), and
//! [`qcow2`] images.
#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod file;
mod handover;
#[cfg(not(loom))]
pub mod qcow2;
