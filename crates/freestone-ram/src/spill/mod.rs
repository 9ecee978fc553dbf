//! Pages of RAM disks on a backing device: block allocation, layout, reads, writes and time-outs.

pub mod blocks;
pub mod budget;
pub mod clean_copies;
mod deadline;
pub mod layout;
pub mod objects;
pub mod reads;
pub mod space;
pub mod store;
pub mod writes;
