//! Recompression of pages in memory: on request by the kernel's rules (`run`), automatically with a
//! trained dictionary (`auto`), in groups of neighbouring pages (`groups`), and by storing pages
//! with the same content once (`dedup`).
//!
//! The keeper thread and the rooms of devices use this one. Lock order:
//! [`Pages::background`](super::memory::pages::Pages::background), then the state of `auto`,
//! `dedup` or `groups`, then the locks of the request path.

pub(in crate::ram) mod auto;
mod cursor;
pub(in crate::ram) mod dedup;
mod group_run;
pub(in crate::ram) mod groups;
pub(in crate::ram) mod options;
pub(in crate::ram) mod run;
mod sample;
mod space;
mod target;
