//! Verbs that show devices and the server, and change nothing.

pub mod list;
pub mod stat;
pub mod top;
