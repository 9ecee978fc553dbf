//! What goes wrong for a user, and the exit status that says so.

use std::env;
use std::io::{self, Write as _};

use freestone_spec::refusal::Errno;
use serde_json::json;
use thiserror::Error;

use crate::control::protocol::Fault;
use crate::output;

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

/// Whether the command line asks for JSON. Errors are told in it then, those of the command line
/// itself among them: so it is looked for before that is understood.
pub fn wants_json() -> bool {
    env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

/// Tells an error on stderr: one line for people, or `{"error": ...}` with the object that the
/// control socket answers with.
pub fn tell(error: &anyhow::Error) {
    // One line, whatever the parts hold.
    let sentence = format!("{error:#}").replace('\n', " ");
    let line = if wants_json() {
        let fault = match error.downcast_ref::<Fault>() {
            Some(fault) => fault.clone(),
            None if error.is::<Usage>() => Fault::invalid(sentence),
            None => Fault::failed(errno(error), sentence),
        };
        json!({ "error": fault }).to_string()
    } else {
        format!("freestone: {sentence}")
    };
    // If stderr is gone, there is nobody to tell.
    let _ = output::Stderr.write_all(format!("{line}\n").as_bytes());
}

fn errno(error: &anyhow::Error) -> Errno {
    let cause = error.chain().find_map(|part| part.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Errno::ETIMEDOUT,
        _ => cause.map_or(Errno::EIO, Errno::of_file),
    }
}

/// Tells what is wrong with the command line; help and version come here as well.
pub fn tell_usage(error: &clap::Error) -> ! {
    if error.use_stderr() && wants_json() {
        let text = error.to_string();
        // The rest is a hint, and how the command is used.
        let first = text.split("\n\n").next().unwrap_or_default();
        let words: Vec<_> = first.trim_start_matches("error: ").split_whitespace().collect();
        tell(&Usage(words.join(" ")).into());
        std::process::exit(i32::from(STATUS_USAGE));
    }
    error.exit()
}

/// The reader of our output went away (`| head`): nothing to complain about.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(e)| e.kind() == io::ErrorKind::BrokenPipe)
}
