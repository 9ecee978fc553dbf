//! Fuzz target: NBD client with arbitrary replies from a server. `nbd_client/mod.rs` of `freestone-fuzz-checks` states
//! the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::nbd_client::NbdClient;

static CLIENT: LazyLock<NbdClient> = LazyLock::new(NbdClient::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    CLIENT.check(input);
});
