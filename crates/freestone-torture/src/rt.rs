//! Threads, locks and time: what this crate uses instead of `std`'s, so that it can be part of a
//! simulation.

pub use freestone_sim::{sync, thread, time};
