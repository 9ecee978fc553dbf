//! An engine for fio that drives Freestone's devices in fio's own process:
//! `ioengine=external:.../libfreestone_fio.so`.
//!
//! The half in C (`engine.c`) knows fio's structures, whose layout belongs to one version of fio.
//! The half in Rust knows devices and is told bytes and offsets. What they call one another is in
//! `engine.h` and `abi.rs`. See docs/fio.md for its use.
//!
//! Without the feature `engine` the crate is empty.
#![cfg(feature = "engine")]
#![expect(unsafe_code)]
// UNSAFETY: fio finds the engine by a symbol that is not mangled, and gives a place for a pointer.

pub mod abi;
mod devices;
mod job;

use std::ffi::c_void;

unsafe extern "C" {
    /// The engine, as fio has it. (`engine.c`)
    fn freestone_engine() -> *mut c_void;
}

/// What fio calls when it has loaded this library: tells where the engine is.
///
/// # Safety
/// `engine` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn get_ioengine(engine: *mut *mut c_void) {
    // SAFETY: the caller's promise; the function only returns an address.
    unsafe { *engine = freestone_engine() };
}
