//! The client of `upgrade`: requests the upgrade, and waits for its result.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_server::verbs::Verb as _;
use freestone_server::verbs::jobs::upgrade::{Outcome, OutcomeParams, OutcomeReply, Params, Reply, Upgrade};
use freestone_spec::{path_text, times};
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::{json, value::RawValue};

use crate::client::connection::Client;
use crate::client::{Common, print_json};
use crate::error::Stdout;
use crate::pidfd;

/// Default maximum wait for the result.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(180);
/// Longest wait for one answer: a connection that is accepted while the program is replaced gets none.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Command line of the verb `upgrade`.
#[derive(Debug, Args)]
pub struct Line {
    /// Program that takes the place of the running one [default: the program at the path of the running one]
    program: Option<PathBuf>,
    /// Upgrade even if content in memory is lost, connections to templates end, or jobs are cancelled
    #[arg(long)]
    force: bool,
    /// Stop waiting after this time: a whole number with ms, s, m or h; the upgrade continues [default: 180s]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    timeout: Option<Duration>,
}

/// Runs the client: requests the upgrade, and waits for its result.
pub fn ask(line: &Line, common: &Common) -> Result<()> {
    let timeout = line.timeout.unwrap_or(TIMEOUT_DEFAULT);
    let program = line.program.as_ref().map(std::path::absolute).transpose().context("PROGRAM: no path")?;
    let program = program.map(|path| path_text::text(&path));
    let mut client = Client::connect(common.control.as_deref())?;
    // The process is opened before the call, because afterwards its process ID may belong to another process.
    let pid = client.server_pid()?;
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot look at the server's process")?;
    let params = serde_json::to_value(Params { program, force: line.force })?;
    let answer = client.call(Upgrade::METHOD, &params)?;
    let Reply { upgrade, .. } =
        serde_json::from_str(answer.get()).context("upgrade: the server's answer is not understood")?;
    let end = Instant::now() + timeout;
    loop {
        if let Some((answer, reply)) = outcome(common)?.filter(|(_, reply)| reply.upgrades >= upgrade) {
            if let Some(why) = reply.last.as_ref().and_then(|last| last.error.as_ref()) {
                bail!(rpc_error!(EIO, "the upgrade failed, and the former program continues: {why}"));
            }
            return if common.json {
                print_json(answer.get())
            } else {
                Outcome::show(&OutcomeParams::default(), &reply, &mut io::stdout())
                    .map_err(|why| Stdout::from(why).into())
            };
        }
        if pidfd::wait(&process, Some(POLL_INTERVAL)).context("cannot wait for the server")? {
            bail!(rpc_error!(ECONNREFUSED, "the server, process {pid}, has ended during the upgrade"));
        }
        if Instant::now() > end {
            bail!(rpc_error!(ETIMEDOUT, "the upgrade has not ended; waited {timeout:?} for it"));
        }
    }
}

/// Asks for the result of the last upgrade. Returns `None` if the server does not answer now.
///
/// # Errors
/// The server answers with an error.
fn outcome(common: &Common) -> Result<Option<(Box<RawValue>, OutcomeReply)>> {
    let Ok(mut client) = Client::connect(common.control.as_deref()) else { return Ok(None) };
    client.set_timeout(ANSWER_MAX)?;
    match client.call(Outcome::METHOD, &json!({})) {
        Ok(answer) => {
            let reply = serde_json::from_str(answer.get())
                .context("upgrade: the server's answer is not understood")?;
            Ok(Some((answer, reply)))
        }
        Err(why) if why.is::<RpcError>() => Err(why),
        Err(_) => Ok(None),
    }
}
