//! Fuzz target: replay of a log of writes with arbitrary content. `power_log.rs` of `freestone-fuzz-checks`
//! states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::power_log;
use freestone_fuzz_checks::scratch::Scratch;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    power_log::check(&SCRATCH, input);
});
