//! Random stacks of devices under random requests, verbs, faults and crashes, judged by one oracle (development only).
//!
//! * [`disk`]: a disk in memory that fails, tears, delays, hangs, loses power and shrinks.
//! * [`ops`], `stack`, `run`: what is done, on what, and how it is judged.
//! * [`oracle`]: which versions each sector of a device may hold now, and after a crash.
//! * [`program`]: the built program, over its sockets.

pub mod disk;
pub mod ops;
pub mod oracle;
pub mod program;
pub mod rt;
