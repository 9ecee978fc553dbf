//! Threads, locks and time, used instead of those of `std` so that this crate can run inside a
//! simulation.

pub use freestone_sim::{sync, thread, time};
