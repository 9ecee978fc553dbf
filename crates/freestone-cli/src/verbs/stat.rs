//! The client of `stat`: selects devices by names and patterns, and reports those that do not exist.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_server::verbs::status::stat::{Params, Stat};
use freestone_server::verbs::text::pattern::Pattern;
use serde::Deserialize;

use crate::client::{Common, call, show};
use crate::error;

/// Command line of the verb `stat`.
#[derive(Debug, Args)]
pub struct Line {
    /// Names or patterns (* matches any characters, ? one) [default: all devices and the server]
    #[arg(value_name = "NAME|PATTERN")]
    names: Vec<String>,
}

/// Runs the client: prints the statistics, and then an error for each name or pattern that matches no device.
pub fn ask(line: &Line, common: &Common) -> Result<ExitCode> {
    #[derive(Deserialize)]
    struct Missing {
        #[serde(default)]
        missing: Vec<String>,
    }
    let params = match line.names.as_slice() {
        [] => Params::default(),
        [name] if !Pattern::is_pattern(name) => Params { name: Some(name.clone()), names: None },
        words => Params { name: None, names: Some(words.to_vec()) },
    };
    let answer = call::<Stat>(&params, common)?;
    show::<Stat>(&params, &answer, common)?;
    if params.names.is_none() {
        return Ok(ExitCode::SUCCESS);
    }
    let Missing { missing } =
        serde_json::from_str(answer.get()).context("stat: the server's answer is not understood")?;
    for word in &missing {
        let why = if Pattern::is_pattern(word) { "no device matches" } else { "no such device" };
        error::print_error(&rpc_error!(ENODEV, "{word}: {why}").into());
    }
    Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(error::STATUS_FAILURE) })
}
