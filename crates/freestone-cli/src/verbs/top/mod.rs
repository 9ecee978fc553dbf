//! The client of `top`: prints or displays the busiest devices at a regular interval.

mod screen;
mod watch;

use std::io::{self, IsTerminal as _};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_server::usage::Usage;
use freestone_server::verbs::Verb as _;
use freestone_server::verbs::status::top::{COUNT_DEFAULT, COUNT_MAX, Params, Sorted, Top};
use freestone_spec::times;
use serde_json::value::RawValue;

use self::watch::watch;
use crate::client::connection::Client;
use crate::client::{Common, show};

/// Minimum and maximum refresh interval.
const EVERY_MIN: Duration = Duration::from_secs(1);
const EVERY_MAX: Duration = Duration::from_secs(3600);
/// Maximum wait for a response of the server.
const RESPONSE_MAX: Duration = Duration::from_secs(30);

/// Command line of the verb `top`.
#[derive(Debug, Args)]
pub struct Line {
    /// Sort order, largest first
    #[arg(long, value_enum, default_value_t)]
    by: Sorted,
    /// Number of devices to show, 1 to 1000 [default: as many as fit the terminal, otherwise 20]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(COUNT_MAX)))]
    count: Option<u32>,
    /// Refresh interval: a whole number with s or m, 1s to 1h
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = times::parse)]
    every: Duration,
    /// Show one interval and exit
    #[arg(long)]
    once: bool,
}

/// A client that repeats the call of `top` over one connection.
struct TopClient(Client);

impl TopClient {
    fn new(common: &Common) -> Result<Self> {
        let client = Client::connect(common.control.as_deref())?;
        client.set_timeout(RESPONSE_MAX)?;
        Ok(Self(client))
    }

    fn call(&mut self, params: Params) -> Result<Box<RawValue>> {
        self.0.call(Top::METHOD, &serde_json::to_value(params).context("cannot write the request")?)
    }
}

/// Runs the client: an interactive display if stdout is a terminal, otherwise tables or JSON.
pub fn ask(line: &Line, common: &Common) -> Result<()> {
    if !(EVERY_MIN..=EVERY_MAX).contains(&line.every) {
        return Err(Usage("--every: must be 1s to 1h".into()).into());
    }
    let mut client = TopClient::new(common)?;
    if !line.once && !common.json && io::stdout().is_terminal() {
        return watch(client, line.by, line.count, line.every);
    }
    let params = Params { by: line.by, count: line.count.unwrap_or(COUNT_DEFAULT) };
    // The first call starts the measurement. The response covers no interval and is not printed.
    client.call(params)?;
    loop {
        thread::sleep(if line.once { EVERY_MIN } else { line.every });
        let answer = client.call(params)?;
        show::<Top>(&params, &answer, common)?;
        if line.once {
            return Ok(());
        }
    }
}
