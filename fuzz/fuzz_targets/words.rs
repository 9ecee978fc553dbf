//! Device words or a configuration file. `words.rs` of `freestone-fuzz-checks` states the oracle.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::words::check(input);
});
