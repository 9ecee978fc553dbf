//! The content of whole devices: its counts and states, copies of it in stored form, and content that
//! is loaded from a file while the device is in use.

pub(in crate::ram) mod block_state;
pub(in crate::ram) mod contents;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod staged;
pub(crate) mod tracking;
