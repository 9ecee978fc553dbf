//! A device of a command line, or a configuration file; the oracle is stated in `words.rs` of `freestone-fuzz-checks`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::words::check(input);
});
