//! Random stacks of devices under random requests, verbs, faults and crashes, judged by one oracle.
//! For development only.
//!
//! * [`disk`]: a simulated disk in memory that fails, tears writes, delays, hangs, loses power and
//!   shrinks.
//! * [`oracle`]: the versions that each sector of a device may hold now, and after a crash.
//! * [`ops`]: the operations of a run, drawn from a seed.
//! * [`stack`]: the devices, the content that each may hold, and the effects of each operation (op)
//!   on them.
//! * [`run`]: executes and judges one run. [`shrink`] shortens a failing run.
//! * [`zoned`]: runs on zoned devices, which have a judge of their own instead of the oracle.
//! * [`exact`]: mode exact: one process per run; the seed decides every step.
//! * [`threads`]: mode threads: runs with real threads.
//! * [`program`]: drives the built `freestone` program over its sockets. `program::calls` makes
//!   system calls of the program fail.

#![allow(missing_docs, reason = "a tool: only what a name does not say has a comment")]

/// Runs the example of the README as a test. No published crate contains the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub mod disk;
pub mod exact;
pub mod ops;
pub mod oracle;
pub mod program;
pub mod rt;
pub mod run;
pub mod shrink;
pub mod stack;
pub mod threads;
pub mod zoned;
