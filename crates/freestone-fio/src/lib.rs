//! An external fio engine that drives Freestone devices in fio's process:
//! `ioengine=external:.../libfreestone_fio.so`.
//!
//! The C half (`engine.c`) handles fio's structures, whose layout depends on the fio version. The
//! Rust half handles devices. `engine.h` and `abi.rs` are the interface between them. See
//! docs/fio.md for usage.
//!
//! Without the feature `engine` the crate is empty.
#![cfg(feature = "engine")]
#![expect(unsafe_code)]
// UNSAFETY: fio finds the engine by an unmangled symbol and passes an out pointer.

pub mod abi;
mod devices;
mod job;

use std::ffi::c_void;

unsafe extern "C" {
    /// Returns fio's `ioengine_ops` (in `engine.c`).
    fn freestone_engine() -> *mut c_void;
}

/// Returns the engine to fio, which calls this after loading the library.
///
/// # Safety
/// `engine` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn get_ioengine(engine: *mut *mut c_void) {
    // SAFETY: guaranteed by the caller; the function only returns an address.
    unsafe { *engine = freestone_engine() };
}
