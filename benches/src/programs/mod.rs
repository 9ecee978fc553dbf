//! Programs under measurement: where they are, how they are started, and the directories in which they run.
//!
//! All benchmarks of servers use this room; nothing in it sends requests.

pub mod program_path;
pub mod run_dir;
pub mod server_process;
pub mod tool;
