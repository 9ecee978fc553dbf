//! The state directory of a server: its devices and exports, restored at the next start after any kind of
//! exit.
//!
//! A change has three steps: `begin` is durable before the change takes effect; then the change is made;
//! `commit` is durable before the verb completes. A change without commit is rolled back at the next start.
//!
//! # The directory
//!
//! The server locks the file `lock`. The file `topology` consists of lines:
//!
//! ```text
//! 16 hex digits   XXH3-64 of the JSON
//! a space
//! JSON            an object
//! a newline
//! ```
//!
//! | object | meaning |
//! |---|---|
//! | `{"format": "freestone state", "version": 3}` | first line |
//! | `{"begin": N, "synced": B, "verb": .., "names": [..]}` | change N begins; the first B bytes of the file were durable before |
//! | `{"put": N, "device": {..}}` | change N creates or modifies a device |
//! | `{"gone": N, "name": ..}` | change N removes a device |
//! | `{"end": N}` | change N is committed |
//!
//! After a disk error the content of the file is unknown. Before any further reply, the state replaces the
//! file by one with the devices and the pending changes. Until that succeeds, changes fail.
//!
//! An invalid line ends the file if no later valid line says that it was durable: a crash has torn the write.
//! Otherwise the file is damaged and is rejected.

mod error;
mod lines;
mod log;
mod state;
mod topology;

pub use self::error::StateError;
pub use self::log::Unfinished;
pub use self::state::{Change, State};
pub use self::topology::{Device, Export, Topology};
