//! Fuzz target: opening of saved zone state with arbitrary content. `zones.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::zones::check(input);
});
