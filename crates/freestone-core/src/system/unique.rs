//! Unique random numbers.

/// Returns a random 64-bit number, used as the identity of a session, merge or file.
pub fn random_id() -> u64 {
    #[cfg(freestone_sim)]
    return freestone_sim::sim::random_u64();
    #[cfg(not(freestone_sim))]
    {
        use std::hash::{BuildHasher as _, Hasher as _, RandomState};
        RandomState::new().build_hasher().finish()
    }
}
