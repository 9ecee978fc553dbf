//! `shutdown`: ends the server, as SIGTERM does, and waits until it has ended.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use freestone_spec::refusal::Errno;
use freestone_spec::times;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as Os;
use rustix::process::{PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Common, Verb, print_json};
use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::saves::Saves;
use crate::service::Service;

/// How long the end is waited for.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);

/// The verb.
pub struct Shutdown;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Give up waiting after so long: a whole number with ms, s, m or h; the server ends all the same
    /// [default: 120s]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    timeout: Option<Duration>,
    /// Also where what devices with keep=yes hold has no room
    #[arg(long)]
    force: bool,
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    #[serde(default)]
    force: bool,
}

/// It has begun to end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// Process number of the server.
    pid: u32,
}

impl Verb for Shutdown {
    const METHOD: &'static str = "shutdown";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let unfit = if params.force { Vec::new() } else { Saves::unfit(service) };
        if !unfit.is_empty() {
            let why = format!("{}; --force ends the server all the same", unfit.join("; "));
            return Err(Fault::failed(Errno::ENOSPC, why));
        }
        let Some(end) = service.end.get() else {
            return Err(Fault::failed(Errno::EBUSY, "the server is still starting"));
        };
        end();
        Ok(Reply { pid: std::process::id() })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// The client's part.
pub fn ask(line: &Line, common: &Common) -> Result<()> {
    let timeout = line.timeout.unwrap_or(TIMEOUT_DEFAULT);
    let mut client = Client::connect(common.control.as_deref())?;
    // Before it is asked: later the number may be another's.
    let pid = client.server()?;
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot look at the server's process")?;
    let answer = client.call(Shutdown::METHOD, &json!({ "force": line.force }))?;
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
            Ok(0) => {
                let why = format!("the server, process {pid}, has not ended yet; waited {timeout:?} for it");
                return Err(Fault::failed(Errno::ETIMEDOUT, why).into());
            }
            Ok(_) => break,
            Err(Os::INTR) => {}
            Err(error) => bail!("cannot wait for the server: {error}"),
        }
    }
    if common.json { print_json(answer.get()) } else { Ok(()) }
}
