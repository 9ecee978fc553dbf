//! Devices from what people write. One schema for the words of a command line, a file of `serve
//! --config` and the control socket: [`entries`] takes words apart, [`kinds`] has a file for each
//! kind of device, [`layers`] one for each layer that can lie over its data, [`attrs`] is what can
//! be read and set while it is there. [`open_device`] does all of it for who drives a device in its
//! own process.
//!
//! It knows no command line, no NBD and no control socket.

pub mod access;
mod advice;
pub mod attrs;
pub mod config;
pub mod entries;
pub mod family;
mod files;
mod full;
pub mod handshake;
pub mod http;
pub mod keys;
pub mod kinds;
pub mod layers;
pub mod limits;
pub mod machine;
pub mod metrics;
mod notes;
mod numbers;
mod open;
pub mod path_text;
pub mod refusal;
pub mod size;
pub mod stores;
pub mod times;
pub mod tls;
#[doc(hidden)]
pub mod written;

pub use open::{Devices, OpenError, Opened, open_device};
