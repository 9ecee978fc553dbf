//! What goes wrong for a user, and the exit status that says so.

use std::io;

use thiserror::Error;

use crate::control::protocol::Fault;

/// The user asked for something that cannot be meant: exit status 2, as clap's own errors.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Our output could not be written.
#[derive(Debug, Error)]
#[error("cannot write to stdout")]
pub struct Stdout(#[from] io::Error);

/// Exit status of a failure.
pub const STATUS_FAILURE: u8 = 1;
/// Exit status of a wrong command line.
pub const STATUS_USAGE: u8 = 2;

/// The exit status for an error.
pub fn status(error: &anyhow::Error) -> u8 {
    let usage = error.is::<Usage>() || error.downcast_ref::<Fault>().is_some_and(Fault::is_usage);
    if usage { STATUS_USAGE } else { STATUS_FAILURE }
}

/// The reader of our output went away (`| head`): nothing to complain about.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(e)| e.kind() == io::ErrorKind::BrokenPipe)
}
