//! Images as devices: raw ones and block devices ([`file`](mod@file)), and [`qcow2`].

pub mod file;
pub mod qcow2;
