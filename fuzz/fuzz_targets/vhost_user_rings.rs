//! Fuzz target: arbitrary ring memory of a vhost-user driver. `vhost_user/rings.rs` of `freestone-fuzz-checks` states
//! the oracle.

#![no_main]

use std::sync::LazyLock;

use freestone_fuzz_checks::vhost_user::VhostUser;

static VHOST_USER: LazyLock<VhostUser> = LazyLock::new(VhostUser::new);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    VHOST_USER.rings(input);
});
