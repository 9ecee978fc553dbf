//! Threads, locks, time and what is random; in a simulation all of it is the simulation's, so that a seed
//! is one run to the last step.

#[cfg(not(freestone_sim))]
pub use std::{sync, thread, time};

#[cfg(freestone_sim)]
use freestone_core::unique;
#[cfg(freestone_sim)]
pub use freestone_sim::{sync, thread, time};

use uuid::Uuid;

/// Bits that nobody else has.
pub fn unique_id() -> Uuid {
    #[cfg(freestone_sim)]
    return Uuid::from_u64_pair(unique::number(), unique::number());
    #[cfg(not(freestone_sim))]
    Uuid::new_v4()
}

/// What time people have. In a simulation it stands still: who compares times does so by the store's clock.
pub fn time_of_day() -> time::SystemTime {
    #[cfg(freestone_sim)]
    return time::UNIX_EPOCH;
    #[cfg(not(freestone_sim))]
    time::SystemTime::now()
}
