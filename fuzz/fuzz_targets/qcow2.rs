//! Fuzz target: reads of a qcow2 image with arbitrary content. `qcow2.rs` of
//! `freestone-fuzz-checks` states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::qcow2;
use freestone_fuzz_checks::scratch::Scratch;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    qcow2::check(&SCRATCH, input);
});
