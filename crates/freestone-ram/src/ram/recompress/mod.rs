//! Recompression of pages in memory: on request by the kernel's rules (`run`), and automatically with
//! a trained dictionary (`auto`).
//!
//! The keeper thread and the rooms of devices use this one. Lock order:
//! [`Pages::background`](super::memory::pages::Pages::background), then the state of `auto`, then the
//! locks of the request path.

pub(in crate::ram) mod auto;
pub(in crate::ram) mod options;
pub(in crate::ram) mod run;
mod sample;
mod space;
mod target;
