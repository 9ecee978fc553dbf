//! Disks in memory with fault injection: an engine, and [`FaultyDisk`]. The torture's disk uses the same engine.

mod engine;
mod faulty;
mod faulty_model;

pub use engine::{DiskEngine, DiskModel, DiskShared, Job, Start, Violations};
pub use faulty::FaultyDisk;
pub use faulty_model::{FaultEffect, FaultSchedule, OpCounts};
