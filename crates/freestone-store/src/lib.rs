//! Images in object storage.

pub mod cache;
pub mod format;
pub mod objects;
mod parallel;
pub mod push;
pub mod store;
