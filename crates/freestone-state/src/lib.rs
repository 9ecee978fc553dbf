//! The state directory of a server: the server's devices and exports, restored at the next start
//! after any kind of exit.
//!
//! A change has three steps. `begin` is durable before the change takes effect; then the change is
//! made; `commit` is durable before the verb completes. A change without commit is rolled back at
//! the next start.
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
//! | `{"begin": N, "synced": B, "verb": .., "names": [..]}` | change N begins; the first B bytes of
//! the file were durable before |
//! | `{"put": N, "device": {..}}` | change N creates or modifies a device |
//! | `{"gone": N, "name": ..}` | change N removes a device |
//! | `{"end": N}` | change N is committed |
//!
//! After a disk error the content of the file is unknown. Before any further reply, the server
//! replaces the file by a new one with the devices and the pending changes. Until that succeeds,
//! changes fail.
//!
//! An invalid line is treated as the end of the file: a crash has torn the write. But if a later
//! valid line proves that the invalid line was durable, the file is damaged and is rejected.

mod error;
mod lines;
mod log;
mod state;
mod topology;

pub use self::error::StateError;
pub use self::lines::VERSION as STATE_VERSION;
pub use self::log::InterruptedVerb;
pub use self::state::{Change, State};
pub use self::topology::{Device, Export, Topology};
