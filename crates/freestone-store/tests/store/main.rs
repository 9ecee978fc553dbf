//! Tests of pushes, reads and prunes of an image store, with an object store in memory.

mod faults;
mod kit;
mod prunes;
mod pushes;
mod reads;
mod retention;
mod schedules;
