//! RAM disks with a backing device for evicted pages, compared with byte vectors, with all kinds of
//! device faults. The tests use only the public API.

mod caps;
mod clean_copies;
mod disk;
mod fault_sweep;
mod faulty_disks;
mod groups;
mod limits;
mod model;
mod passes;
mod slow;
mod spill;
mod states;
mod watched;
