//! What the steps need before they run: Debian packages, the workspace's programs, the engine for fio, and the copy of
//! the sources with variants. Also the documentation, which uses the test build.
//!
//! Uses only `cargo`. The steps, benchmarks and packaging use it.

pub mod documentation;
pub mod fio;
pub mod packages;
pub mod variants;
pub mod workspace;
