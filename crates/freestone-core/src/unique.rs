//! Numbers that nobody else has.

/// A random 64-bit number, by which one session, merge or file is told from all others.
pub fn number() -> u64 {
    #[cfg(freestone_sim)]
    return freestone_sim::sim::word();
    #[cfg(not(freestone_sim))]
    {
        use std::hash::{BuildHasher as _, Hasher as _, RandomState};
        RandomState::new().build_hasher().finish()
    }
}
