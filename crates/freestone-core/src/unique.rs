//! Unique random numbers.

/// Returns a random 64-bit number, used as the identity of a session, merge or file.
pub fn number() -> u64 {
    #[cfg(freestone_sim)]
    return freestone_sim::sim::word();
    #[cfg(not(freestone_sim))]
    {
        use std::hash::{BuildHasher as _, Hasher as _, RandomState};
        RandomState::new().build_hasher().finish()
    }
}
