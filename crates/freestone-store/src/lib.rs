//! Images in object storage.

pub mod format;
pub mod objects;
mod parallel;
pub mod push;
pub mod store;
