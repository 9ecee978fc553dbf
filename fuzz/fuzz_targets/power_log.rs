//! A log of writes with any content; the oracle is stated in `power_log.rs` of `freestone-fuzz-checks`.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::power_log;
use freestone_fuzz_checks::scratch::Scratch;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    power_log::check(&SCRATCH, input);
});
