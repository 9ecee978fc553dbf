//! An external engine of the benchmark fio that drives Freestone devices in fio's process:
//! `ioengine=external:.../libfreestone_fio.so`.
//!
//! The C half (`engine.c`) handles fio's structures, whose layout depends on the fio version. The
//! Rust half handles devices. `engine.h` and `abi.rs` are the interface between the halves. See
//! docs/how-to/fio.md for usage.
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
    /// Returns a pointer to fio's `ioengine_ops`, a static structure in `engine.c`.
    fn freestone_engine() -> *mut c_void;
}

/// Passes the engine to fio, which calls this function after loading the library.
///
/// # Safety
/// `engine` is a valid pointer to which this function may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn get_ioengine(engine: *mut *mut c_void) {
    // SAFETY: guaranteed by the caller; the function only returns an address.
    unsafe { *engine = freestone_engine() };
}
