//! Parses and checks device specifications, and builds devices from them.
//!
//! The command line, the configuration file (`serve --config`) and the control socket share one
//! schema. [`entries`] parses `NAME=KIND,key=value`. [`kinds`] contains a module for each kind of
//! device, and [`layers`] one for each layer over a device's data. [`attrs`] reads and sets the
//! attributes of a device. [`open_device`] parses, checks and builds devices for a program that
//! uses a device in its own process.
//!
//! The crate does not depend on the command line, the NBD server or the control socket.

pub mod access;
mod advice;
pub mod aliases;
pub mod attrs;
#[doc(hidden)]
pub mod check_input;
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

pub use open::{Devices, OpenError, OpenedDevice, open_device};
