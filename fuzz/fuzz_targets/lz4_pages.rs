//! Fuzz target: compression of pages by lz4. `lz4_pages.rs` of `freestone-fuzz-checks` states the oracle.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::lz4_pages::check(input);
});
