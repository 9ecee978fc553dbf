//! Threads, locks and time that a seed decides (development only).
//!
//! Code that takes its threads, locks, channels and clock from [`sync`], [`thread`] and [`time`]
//! runs as it is in a normal build, where these are `std`'s. Built with `--cfg freestone_sim` they
//! are those of [`sim`]: real threads, of which exactly one runs at a time. Whenever one takes a
//! lock, touches a shared atomic, waits, or starts another, the seed may choose who goes on. Nobody
//! ever sleeps: where all wait, the clock jumps to the earliest deadline. So one seed is one run,
//! to the last step, and a run in which nobody can go on is a deadlock that is told with every
//! thread's stack.
//!
//! Not simulated: memory orderings (every access is as if it were `SeqCst`; the loom models check
//! them), and what the kernel does (files are read and written for real, at once).

#[cfg(freestone_sim)]
pub use sim::{sync, thread, time};
#[cfg(not(freestone_sim))]
pub use std::{sync, thread, time};

pub mod sim;
