//! Deterministic simulation of threads, locks and time (development only).
//!
//! Code under test imports threads, locks, channels and the clock from [`sync`], [`thread`] and
//! [`time`]. In a normal build these modules are those of `std`. With `--cfg freestone_sim` they
//! are those of [`sim`]: real threads, exactly one of which runs at a time. Whenever a thread takes
//! a lock, accesses a shared atomic, waits, or starts a thread, another thread may be selected to
//! run. The seed determines each selection. A simulated sleep only advances the virtual clock: if
//! all threads wait, the clock jumps to the earliest deadline. So a seed reproduces a run exactly.
//! If no thread can run, the simulation reports a deadlock with the stacks of all threads.
//!
//! Not simulated: memory orderings (all accesses are sequentially consistent; the loom models check
//! orderings), and the kernel (file I/O is real and synchronous).

#[cfg(freestone_sim)]
pub use sim::{sync, thread, time};
#[cfg(not(freestone_sim))]
pub use std::{sync, thread, time};

pub mod sim;
