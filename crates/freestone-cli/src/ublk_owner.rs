//! `ublk-owner NODE`: whose a block device is. udev asks it, to give a user the nodes of his device
//! (`packaging/udev`).

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::error::{STATUS_FAILURE, Stdout};

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The node: ublkcN, ublkbN, or a partition of that
    #[arg(value_name = "NODE")]
    node: String,
}

/// Prints user and group. Status 1 and no word: it is root's, whom udev gives the nodes by itself.
pub fn tell(line: &Line) -> Result<ExitCode> {
    match freestone_ublk::owner(&line.node).context("ublk-owner")? {
        Some((user, group)) => {
            writeln!(io::stdout(), "{user} {group}").map_err(Stdout::from)?;
            Ok(ExitCode::SUCCESS)
        }
        None => Ok(ExitCode::from(STATUS_FAILURE)),
    }
}
