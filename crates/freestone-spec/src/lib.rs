//! Parses and checks device specifications, and builds devices from them.
//!
//! The command line, the configuration file (`serve --config`) and the control socket share one
//! schema of devices. [`schema`] lists the keys. [`entries`] parses `NAME=KIND,key=value`. [`kinds`] contains a module for each kind of
//! device, and [`layers`] one for each layer over a device's data. [`attrs`] reads and sets the
//! attributes of a device. [`open_device`] parses, checks and builds devices for a program that
//! uses a device in its own process.
//!
//! The crate does not depend on the command line, the NBD server or the control socket.

#[macro_use]
pub mod refusal;
mod advice;
pub mod attrs;
#[doc(hidden)]
pub mod check_input;
pub mod family;
mod files;
mod full;
pub mod kinds;
pub mod layers;
pub mod limits;
pub mod machine;
mod notes;
mod open;
pub mod schema;
pub mod stores;
mod text;
pub mod tls;

pub use text::{aliases, entries, keys, numbers, path_text, size, times};

pub use open::{Devices, OpenError, OpenedDevice, open_device};
