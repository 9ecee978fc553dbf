//! Memory of RAM disks and of the server, writeback and backing devices, as verbs and statistics show them.

mod backing_devices;
mod memory;
mod writeback;
