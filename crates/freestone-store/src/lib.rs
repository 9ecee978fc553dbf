//! Images in object storage.

pub mod format;
pub mod objects;
