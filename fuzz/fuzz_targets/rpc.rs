//! Fuzz target: an arbitrary JSON-RPC request line to the control server. `rpc.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    freestone_fuzz_checks::rpc::check(input);
});
