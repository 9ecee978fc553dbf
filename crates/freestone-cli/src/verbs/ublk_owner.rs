//! `ublk-owner NODE`: prints the owner of a ublk device. A udev rule (`packaging/udev`) calls this command to
//! set the owner of the device nodes.

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::error::{STATUS_FAILURE, Stdout};

/// Arguments of `ublk-owner`.
#[derive(Debug, Args)]
pub struct Line {
    /// Name of the device node: ublkcN, ublkbN, or one of its partitions
    #[arg(value_name = "NODE")]
    node: String,
}

/// Prints user and group of the owner as numbers. If the owner is root, prints nothing and returns status 1,
/// because udev creates nodes for root by default.
pub fn print_owner(line: &Line) -> Result<ExitCode> {
    match freestone_ublk::device_owner(&line.node).context("ublk-owner")? {
        Some((user, group)) => {
            writeln!(io::stdout(), "{user} {group}").map_err(Stdout::from)?;
            Ok(ExitCode::SUCCESS)
        }
        None => Ok(ExitCode::from(STATUS_FAILURE)),
    }
}
