//! Devices from what people write. One schema for the words of a command line, a file of `serve --config` and the control
//! socket: [`entries`] takes words apart, [`spec`] knows kinds, keys and values, [`build`] sets devices up, [`attrs`] is what
//! can be read and set while they are there. [`open_device`] does all of it for who drives a device in its own process.
//!
//! It knows no command line, no NBD and no control socket.

mod advice;
pub mod attrs;
pub mod build;
pub mod config;
pub mod entries;
pub mod entry;
pub mod layers;
pub mod machine;
pub mod merging;
mod notes;
mod open;
mod readonly;
pub mod refusal;
pub mod registry;
mod shape;
pub mod size;
pub mod spec;
#[doc(hidden)]
pub mod written;

pub use open::{OpenError, Opened, open_device};
