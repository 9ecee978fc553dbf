//! Threads, locks and time: this crate uses these instead of `std`'s, so that it can run inside a
//! simulation.

pub use freestone_sim::{sync, thread, time};
