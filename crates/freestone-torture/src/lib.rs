//! Random stacks of devices under random requests, verbs, faults and crashes, judged by one oracle
//! (development only).
//!
//! * [`disk`]: a disk in memory that fails, tears, delays, hangs, loses power and shrinks.
//! * [`oracle`]: which versions each sector of a device may hold now, and after a crash.
//! * [`ops`]: what a run consists of, drawn from a seed.
//! * [`stack`]: the devices, what each may hold, and what an op does to them.
//! * [`run`]: one run, and its judge. [`shrink`] makes a failing one short.
//! * [`zoned`]: runs on zones, which have a judge of their own.
//! * [`exact`]: each run a process, of which the seed decides every step.
//! * [`threads`]: runs with real threads.
//! * [`program`]: the built program, over its sockets. `program::calls` makes its system calls fail.

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
