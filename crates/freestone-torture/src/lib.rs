//! Random stacks of devices under random requests, verbs, faults and crashes, judged by one oracle (development only).
//!
//! * [`oracle`]: which versions each sector of a device may hold now, and after a crash.

pub mod oracle;
pub mod rt;
