//! Errors of the program: their output on stderr, and the exit status.

use std::env;
use std::io::{self, Write as _};

use freestone_control::protocol::RpcError;
use freestone_server::usage::Usage;
use freestone_spec::refusal::Errno;
use serde_json::json;
use thiserror::Error;

use crate::output;

/// A failed write to standard output.
#[derive(Debug, Error)]
#[error("cannot write to stdout")]
pub struct Stdout(#[from] io::Error);

/// Exit status of a failure.
pub const STATUS_FAILURE: u8 = 1;
/// Exit status of an invalid command line or configuration.
pub const STATUS_USAGE: u8 = 2;

/// Returns the exit status for an error.
pub fn status(error: &anyhow::Error) -> u8 {
    let usage = error.is::<Usage>() || error.downcast_ref::<RpcError>().is_some_and(RpcError::is_usage);
    if usage { STATUS_USAGE } else { STATUS_FAILURE }
}

/// Returns true if the command line has the option `--json`. Scans the arguments, because errors of parsing
/// the command line are reported in JSON as well.
pub fn wants_json() -> bool {
    env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

/// Prints an error on stderr: one line of text, or `{"error": ...}` with the same error object as in
/// responses of the control socket.
pub fn print_error(error: &anyhow::Error) {
    // Messages of causes can contain line breaks, but the output must be one line.
    let sentence = format!("{error:#}").replace('\n', " ");
    let line = if wants_json() {
        let fault = match error.downcast_ref::<RpcError>() {
            Some(fault) => fault.clone(),
            None if error.is::<Usage>() => RpcError::invalid(sentence),
            None => RpcError::failed(errno(error), sentence),
        };
        json!({ "error": fault }).to_string()
    } else {
        format!("freestone: {sentence}")
    };
    // A closed stderr is ignored.
    let _ = output::Stderr.write_all(format!("{line}\n").as_bytes());
}

fn errno(error: &anyhow::Error) -> Errno {
    let cause = error.chain().find_map(|part| part.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Errno::ETIMEDOUT,
        _ => cause.map_or(Errno::EIO, Errno::of_file),
    }
}

/// Prints an error of the command line, or the output of `--help` and `--version`, and exits.
pub fn exit_with_usage_error(error: &clap::Error) -> ! {
    if error.use_stderr() && wants_json() {
        let text = error.to_string();
        // Keeps the message only: in clap's text, hint and usage follow after an empty line.
        let first = text.split("\n\n").next().unwrap_or_default();
        let words: Vec<_> = first.trim_start_matches("error: ").split_whitespace().collect();
        print_error(&Usage(words.join(" ")).into());
        std::process::exit(i32::from(STATUS_USAGE));
    }
    error.exit()
}

/// Returns true if the reader of standard output is gone (`| head`), which is not an error.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(e)| e.kind() == io::ErrorKind::BrokenPipe)
}
