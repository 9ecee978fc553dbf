//! Which devices a server has, and where they are to be seen, kept in a directory: what was
//! answered is there after the next start, however the server ended.
//!
//! A change is begun, which is durable before it takes effect; then it is made; then it is
//! committed, which is durable before it is answered. What was begun and not committed is not there
//! at the next start.
//!
//! # The directory
//!
//! `lock` is locked by the server that has it. `topology` is a file of lines:
//!
//! ```text
//! 16 hex digits   XXH3-64 of what follows the blank
//! a blank
//! JSON            an object
//! a newline
//! ```
//!
//! | object | what it says |
//! |---|---|
//! | `{"format": "freestone state", "version": 3}` | the first line |
//! | `{"begin": N, "synced": B, "verb": .., "names": [..]}` | change N is about to take effect; the first B bytes of the file were durable then |
//! | `{"put": N, "device": {..}}` | it makes a device, or has it otherwise |
//! | `{"gone": N, "name": ..}` | it removes a device |
//! | `{"end": N}` | it is committed |
//!
//! After an error of the disk the content of the file is unknown. Before anything more is answered, the state
//! replaces the file by one with the devices and the changes that have begun. Until that succeeds, changes fail.
//!
//! A line that is not whole ends the file where nothing that is whole and comes later says that it was
//! durable: a crash has cut it off. Otherwise the file is damaged, and is not used.

mod error;
mod lines;
mod log;
mod state;
mod topology;

pub use self::error::StateError;
pub use self::log::Unfinished;
pub use self::state::{Change, State};
pub use self::topology::{Device, Export, Topology};
