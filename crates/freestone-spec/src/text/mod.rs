//! Words of specifications: `NAME=KIND,key=value`, keys with their former names, sizes, times, numbers and paths.
//!
//! The room owns nothing and opens nothing. All modules of the crate may use it.

pub mod aliases;
pub mod entries;
pub mod keys;
pub mod numbers;
pub mod path_text;
pub mod size;
pub mod times;
