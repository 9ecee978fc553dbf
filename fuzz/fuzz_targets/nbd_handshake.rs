//! Fuzz target: NBD handshake of the server with arbitrary bytes from a client. `nbd/handshake.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::nbd::Nbd;

static NBD: LazyLock<Nbd> = LazyLock::new(Nbd::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    NBD.handshake(input);
});
