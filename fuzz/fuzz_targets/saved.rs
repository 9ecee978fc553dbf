//! Fuzz target: restoring RAM devices from a saved file with arbitrary content. `saved.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::saved;
use freestone_fuzz_checks::scratch::Scratch;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    saved::check(&SCRATCH, input);
});
