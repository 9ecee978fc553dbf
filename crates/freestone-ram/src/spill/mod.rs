//! Pages of RAM disks on a backing device: block allocation, layout, reads, writes and time-outs.

pub mod blocks;
mod deadline;
pub mod layout;
pub mod objects;
pub mod reads;
pub mod space;
pub mod store;
