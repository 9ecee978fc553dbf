//! Objects of a store with any content; the oracle is stated in `store/mod.rs` of `freestone-fuzz-checks`.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::store::Stores;

static STORES: LazyLock<Stores> = LazyLock::new(Stores::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    STORES.check(input);
});
