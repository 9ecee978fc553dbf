//! Zoned devices: the state machine, errors, and what is there after a crash.

mod conformance;
mod cuts;
mod errors;
mod failed_writes;
mod model;
mod state;
mod table;
mod threads;
