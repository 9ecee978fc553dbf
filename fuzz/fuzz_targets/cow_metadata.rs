//! Fuzz target: opening of an exception store on a COW device with arbitrary content.
//!
//! An input is the size of the COW device and of the origin (two bytes each), a header, and the areas one after
//! another.
//!
//! The oracle is in `metadata.rs` of the library's tests, which also runs it over this corpus and over mutated
//! exception stores:
//! * Opening never panics, and uses bounded memory.
//! * An exception store that is refused was not written to.
//! * An exception store that is opened has the exceptions that the reference parser finds. Each is for a chunk of
//!   the origin, and has its own chunk of the COW device, outside of the metadata. Opening writes nothing, except a
//!   new exception store if the device begins with zeroes, or zeroes after the end of the exception list.
//! * One more exception, if there is room, is stored in an unused chunk after the others. After reopening, this
//!   exception and all others exist.
//! * A merge returns every exception exactly once, and leaves an empty exception store.

#![no_main]

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/freestone-cow/tests/snapshots/store/disk.rs"]
mod disk;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/freestone-cow/tests/snapshots/store/metadata.rs"]
mod metadata;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = metadata::check(input);
});
