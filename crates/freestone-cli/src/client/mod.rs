//! The client of the control socket: calls verbs in a server, and prints their results and progress.
//!
//! The verbs themselves, with their parameters and text output, are in `freestone-server`. `connection` owns the
//! socket; `long` and `names` call verbs with progress and for several devices. Verbs of the client and mounts use
//! this room.

mod bar;
pub mod connection;
mod indent;
pub mod long;
pub mod names;

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_server::verbs::Verb;
use serde_json::value::RawValue;

use crate::error::Stdout;
use connection::Client;
use indent::indented;

const CONTROL_HELP: &str = "Control socket of the server [default: $FREESTONE_CONTROL, else \
    $XDG_RUNTIME_DIR/freestone/control.sock, else /tmp/freestone-UID/control.sock]";

/// Options that all verbs have on the command line.
#[derive(Debug, Args)]
pub struct Common {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[arg(long, value_name = "PATH", help = CONTROL_HELP)]
    pub control: Option<PathBuf>,
}

/// Command line of a verb that is not long: its arguments and the common options.
#[derive(Debug, Args)]
pub struct Call<A: Args> {
    #[command(flatten)]
    pub args: A,
    /// The options `--json` and `--control`.
    #[command(flatten)]
    pub common: Common,
}

/// Calls a verb in the server and prints the result.
pub fn ask<V: Verb>(params: &V::Params, common: &Common) -> Result<()> {
    let answer = call::<V>(params, common)?;
    show::<V>(params, &answer, common)
}

/// Calls a verb with a long result part by part, and prints each part. `next` returns the parameters for the
/// part after a result, or `None` after the last part.
pub fn ask_in_parts<V: Verb>(
    mut params: V::Params,
    next: impl Fn(&V::Params, &V::Reply) -> Option<V::Params>,
    common: &Common,
) -> Result<()> {
    loop {
        let answer = call::<V>(&params, common)?;
        show::<V>(&params, &answer, common)?;
        let reply = serde_json::from_str(answer.get())
            .with_context(|| format!("{}: the server's answer is not understood", V::METHOD))?;
        match next(&params, &reply) {
            Some(next) => params = next,
            None => return Ok(()),
        }
    }
}

/// Calls a verb in the server, and returns the result as JSON.
pub fn call<V: Verb>(params: &V::Params, common: &Common) -> Result<Box<RawValue>> {
    let mut client = Client::connect(common.control.as_deref())?;
    let request = serde_json::to_value(params).context("cannot write the request")?;
    client.call(V::METHOD, &request)
}

/// Prints the result of a verb as JSON or as text.
pub fn show<V: Verb>(params: &V::Params, answer: &RawValue, common: &Common) -> Result<()> {
    if common.json { print_json(answer.get()) } else { print::<V>(params, answer, &mut io::stdout().lock()) }
}

/// Prints a JSON response of the server, indented.
pub fn print_json(json: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(&indented(json)).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}

/// Prints the result of a verb as text.
pub fn print<V: Verb>(params: &V::Params, answer: &RawValue, out: &mut dyn Write) -> Result<()> {
    let reply = serde_json::from_str(answer.get())
        .with_context(|| format!("{}: the server's answer is not understood", V::METHOD))?;
    V::show(params, &reply, out).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}
