//! Fuzz target: NBD transmission phase of the server with an arbitrary stream of requests. `nbd/transmission.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::nbd::Nbd;

static NBD: LazyLock<Nbd> = LazyLock::new(Nbd::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    NBD.transmission(input);
});
