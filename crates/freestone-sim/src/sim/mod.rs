//! The simulation. See the crate.
//!
//! A thread that was not started within [`run`] is left alone: for it everything behaves as `std`'s
//! does.

mod schedule;
pub mod sync;
pub mod thread;
pub mod time;

pub use schedule::{Config, Summary, cpu, point, run, summary, word};

/// CPUs that the simulated machine has.
pub const CPUS: usize = 3;
