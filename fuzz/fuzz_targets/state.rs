//! Fuzz target: topology file in the state directory of a server, with arbitrary content. `state.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::state::States;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static STATES: LazyLock<States> = LazyLock::new(States::new);
    STATES.check(input);
});
