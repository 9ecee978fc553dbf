//! Opening an exception store on a device with any content.
//!
//! An input is the size of the device and of the origin (two bytes each), a header, and the areas one after another.
//!
//! The oracle (in `metadata.rs` of the library's tests, which also runs it over this corpus and over mutated stores):
//! * Opening never panics and takes bounded memory.
//! * What is refused was not written to.
//! * What is opened has the exceptions that a plain reading of the format gives, each of a chunk that the origin has, at a
//!   place of its own that is no metadata. Opening wrote nothing but a new store where the device began with zeroes, or
//!   zeroes behind the end of the list.
//! * One more exception, if there is room, goes to an unused place behind the others; after opening again it is there, and
//!   all others are.
//! * A merge gives every exception exactly once, and leaves an empty store.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../crates/freestone/tests/library/cow/store/disk.rs"]
mod disk;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../crates/freestone/tests/library/cow/store/metadata.rs"]
mod metadata;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = metadata::check(input);
});
