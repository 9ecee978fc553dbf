//! The state of zones on a device with any content; the oracle is stated in `zones.rs` of `freestone-fuzz-checks`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::zones::check(input);
});
