//! Words of command lines and tables of output, which verbs share.

pub mod keys;
pub mod pattern;
pub mod table;
pub mod words;
