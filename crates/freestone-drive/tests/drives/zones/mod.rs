//! Zoned devices: the state machine of zones, errors, and crashes.

mod conformance;
mod cuts;
mod errors;
mod failed_writes;
mod model;
mod state;
mod table;
mod threads;
