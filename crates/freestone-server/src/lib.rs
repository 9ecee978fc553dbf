#![doc = include_str!("../README.md")]
//!
//! # Structure
//! [`Server`] starts a server with devices by specification (`ram0=ram,disksize=1G`), and ends it in order. The
//! program `freestone serve` is a command line around the same code. The crate installs no signal handlers, changes no
//! limits of the process, writes nothing on standard output, and logs with `tracing`.
//!
//! Modules, each of which uses only modules before it: `config`, `settings`, `devices`, `exports`, `jobs`, `declared`,
//! `persistence`, `upgrade`, `service`, `changes`, `startup`, `verbs`, `observe`, `server`. Only the saves of `persistence` also
//! use `service`. The hidden modules are for the program `freestone`, and change without notice.

#[macro_use]
extern crate freestone_control;
#[macro_use]
extern crate freestone_spec;

#[doc(hidden)]
pub mod changes;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod declared;
mod devices;
#[doc(hidden)]
pub mod exports;
#[doc(hidden)]
pub mod inputs;
#[doc(hidden)]
pub mod jobs;
#[doc(hidden)]
pub mod observe;
#[doc(hidden)]
pub mod persistence;
mod process_memory;
#[doc(hidden)]
pub mod recovery;
mod server;
#[doc(hidden)]
pub mod service;
#[doc(hidden)]
pub mod settings;
mod startup;
#[doc(hidden)]
pub mod upgrade;
#[doc(hidden)]
pub mod usage;
#[doc(hidden)]
pub mod verbs;

pub use server::{Server, ServerBuilder, ServerError};
#[doc(hidden)]
pub use server::{plan, running};
