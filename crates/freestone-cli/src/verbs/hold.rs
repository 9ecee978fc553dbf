//! `hold SOCKET`: the process that holds the memory of the devices of a recoverable server.

use std::os::fd::AsFd as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_server::recovery;

use crate::serve::process;

/// The command line of `hold`.
#[derive(Debug, Args)]
pub struct Line {
    /// Path of the socket, whose listening end is standard input
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
}

/// Holds the memory of devices until no server needs it.
pub fn hold(line: &Line) -> Result<()> {
    process::raise_open_files();
    let listener = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    recovery::hold(&listener, &line.socket).with_context(|| line.socket.display().to_string())
}
