//! The file of a server's state with any content; the oracle is stated in `state.rs` of `freestone-fuzz-checks`.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::state::States;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static STATES: LazyLock<States> = LazyLock::new(States::new);
    STATES.check(input);
});
