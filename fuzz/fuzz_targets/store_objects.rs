//! Fuzz target: stored objects of an image store with arbitrary content. `store/mod.rs` of `freestone-fuzz-checks`
//! states the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::store::Stores;

static STORES: LazyLock<Stores> = LazyLock::new(Stores::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    STORES.check(input);
});
