//! The first devices of a server: those of the command line and file, or those of the state directory, also when their
//! remote servers answer late. Only `server` uses this room; `pending_devices` owns the thread that waits.

pub mod adoption;
pub mod pending_devices;
mod recreate;
pub mod start;
