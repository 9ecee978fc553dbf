//! Fuzz target: parsers of device words on a command line, and of configuration files. `words.rs`
//! of `freestone-fuzz-checks` states the oracle.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::words::check(input);
});
