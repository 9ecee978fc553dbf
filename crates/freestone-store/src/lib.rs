//! Images in object storage.

pub mod cache;
pub mod format;
pub mod image;
pub mod objects;
mod parallel;
pub mod prune;
pub mod push;
mod rt;
pub mod store;
pub mod url;
