//! What the steps need before they run: Debian packages, the workspace's programs, the engine for fio, and the copy of
//! the sources with variants. Also the documentation and the interfaces of crates, which use the test build.
//!
//! Uses only `cargo`, and the names of the public crates in `tidy`. The steps, benchmarks and packaging use it.

pub mod api;
pub mod cargo_tools;
pub mod documentation;
pub mod fio;
pub mod packages;
pub mod variants;
pub mod workspace;
