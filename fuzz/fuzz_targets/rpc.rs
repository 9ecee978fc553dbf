//! A line to the control server; the oracle is stated in `rpc.rs` of `freestone-fuzz-checks`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::rpc::check(input);
});
