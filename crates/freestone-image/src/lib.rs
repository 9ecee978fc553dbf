//! Images as devices: raw ones and block devices ([`file`](mod@file)), and [`qcow2`].
#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod file;
mod handover;
#[cfg(not(loom))]
pub mod qcow2;
