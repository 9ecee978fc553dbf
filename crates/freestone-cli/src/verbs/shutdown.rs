//! The client of `shutdown`: requests the shutdown, and waits until the process of the server has ended.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use freestone_server::verbs::Verb as _;
use freestone_server::verbs::jobs::shutdown::Shutdown;
use freestone_spec::times;
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::json;

use crate::client::connection::Client;
use crate::client::{Common, print_json};
use crate::pidfd;

/// Default maximum time that the client waits for the end of the server's process.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);

/// Command line of the verb `shutdown`.
#[derive(Debug, Args)]
pub struct Line {
    /// Stop waiting after this time: a whole number with ms, s, m or h; the server ends
    /// nevertheless [default: 120s]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    timeout: Option<Duration>,
    /// Shut down even if there is no room to save devices with keep=yes
    #[arg(long)]
    force: bool,
}

/// Runs the client: requests the shutdown, and waits for the end of the server's process.
pub fn ask(line: &Line, common: &Common) -> Result<()> {
    let timeout = line.timeout.unwrap_or(TIMEOUT_DEFAULT);
    let mut client = Client::connect(common.control.as_deref())?;
    // The process is opened before the call, because afterwards its process ID may belong to another process.
    let pid = client.server_pid()?;
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot look at the server's process")?;
    let answer = client.call(Shutdown::METHOD, &json!({ "force": line.force }))?;
    if !pidfd::wait(&process, Some(timeout)).context("cannot wait for the server")? {
        bail!(rpc_error!(
            ETIMEDOUT,
            "the server, process {pid}, has not ended yet; waited {timeout:?} for it"
        ));
    }
    if common.json { print_json(answer.get()) } else { Ok(()) }
}
