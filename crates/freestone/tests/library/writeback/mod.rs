//! RAM disks with a backing device: evicted pages compared with byte vectors, with all kinds of
//! disk faults. Uses only the public API.

mod caps;
mod disk;
mod fault_sweep;
mod faulty_disks;
mod limits;
mod model;
mod passes;
mod slow;
mod spill;
mod states;
mod watched;
