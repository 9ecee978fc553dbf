//! The simulation of threads, locks and time; see the crate documentation.
//!
//! Threads that were not started within [`run`] use the behaviour of `std`.

mod schedule;
pub mod sync;
pub mod thread;
pub mod time;

pub use schedule::{Config, Summary, cpu, pass_point, random_u64, run, summary};

/// Number of CPUs of the simulated machine.
pub const CPUS: usize = 3;
