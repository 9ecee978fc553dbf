//! Benchmarks of a RAM disk in this process, beside the bare codec and the kernel's zram.
//!
//! Owns the bare codec and the device set-up that other benchmarks compare with.

pub mod bare;
pub mod codec;
pub mod memory;
pub mod setup;
pub mod threads;
pub mod zram;
pub mod zram_device;
