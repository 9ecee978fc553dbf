//! Images in object storage.

pub mod objects;
