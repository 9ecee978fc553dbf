//! Tests of pushes, reads and prunes with a store in memory.

mod faults;
mod kit;
mod prunes;
mod pushes;
mod reads;
mod retention;
mod schedules;
