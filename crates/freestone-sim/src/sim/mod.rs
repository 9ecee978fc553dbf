//! The simulation; see the crate documentation.
//!
//! Threads that were not started within [`run`] behave as with `std`.

mod schedule;
pub mod sync;
pub mod thread;
pub mod time;

pub use schedule::{Config, Summary, cpu, point, run, summary, word};

/// Number of CPUs of the simulated machine.
pub const CPUS: usize = 3;
