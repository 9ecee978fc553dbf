//! The RAM disk with a backing device below it: spilled pages against plain bytes, with every fault
//! that a disk can have. Written against the public API only.

mod caps;
mod disk;
mod fault_sweep;
mod limits;
mod model;
mod passes;
mod slow;
mod spill;
mod states;
mod trouble;
mod watched;
