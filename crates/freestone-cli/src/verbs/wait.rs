//! `wait`: waits until a server is ready, or until a background job has ended.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_control::socket::{Identity, identity};
use freestone_server::jobs::JobInfo;
use freestone_server::verbs::Verb as _;
use freestone_server::verbs::jobs::jobs;
use freestone_server::verbs::status::list;
use freestone_spec::refusal::Errno;
use freestone_spec::{path_text, times};
use rustix::io::Errno as Os;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::client::connection::Client;
use crate::client::{Common, print_json};
use crate::error::Stdout;
use crate::pidfd;

/// Interval between connection attempts, and initial interval between polls of a job.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum interval between polls of a job; the interval doubles up to this value.
const JOB_POLL_MAX: Duration = Duration::from_millis(200);
/// Default maximum wait for a server to become ready.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// Command line of the verb `wait`.
#[derive(Debug, Args)]
pub struct Line {
    /// Give up after this time: a whole number with ms, s, m or h [default: 10s; with --job, never]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    timeout: Option<Duration>,
    /// Wait for the end of this background job
    #[arg(long, value_name = "NUMBER")]
    job: Option<u64>,
    /// Fail at once if this process (the server) ends, as in `serve ... & wait --pid $!`
    #[arg(long, value_name = "PID", conflicts_with = "job", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
}

/// Runs the verb `wait`. Errors that waiting cannot resolve are returned at once.
pub fn wait(line: &Line, common: &Common) -> Result<()> {
    match line.job {
        Some(job) => wait_for_job(job, line.timeout, common),
        None => wait_until_ready(line, common),
    }
}

/// Waits for the end of a background job. Returns the error of the job, as if the job had run in the foreground.
fn wait_for_job(job: u64, timeout: Option<Duration>, common: &Common) -> Result<()> {
    let end = timeout.map(|timeout| Instant::now() + timeout);
    let mut client = Client::connect(common.control.as_deref())?;
    let mut pause = POLL_INTERVAL;
    loop {
        let answer = client.call(jobs::AllJobs::METHOD, &json!({ "job": job }))?;
        let reply: jobs::Reply =
            serde_json::from_str(answer.get()).context("jobs: the server's answer is not understood")?;
        let ended = reply.jobs.first().filter(|info| info.has_ended());
        if let Some(JobInfo { error: Some(fault), .. }) = ended {
            return Err(fault.clone().into());
        }
        if let Some(info) = ended {
            let json = serde_json::to_string(&info).context("cannot write the answer")?;
            return if common.json { print_json(&json) } else { Ok(()) };
        }
        let left = end.map_or(pause, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            let timeout = timeout.unwrap_or_default();
            bail!(rpc_error!(ETIMEDOUT, "job {job}: has not ended; waited {timeout:?} for it"));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(JOB_POLL_MAX);
    }
}

/// Waits until the server is ready or has ended, or until the timeout.
fn wait_until_ready(line: &Line, common: &Common) -> Result<()> {
    let timeout = line.timeout.unwrap_or(TIMEOUT_DEFAULT);
    let end = Instant::now() + timeout;
    let (path, _) = Client::locate(common.control.as_deref())?;
    let ended = |why: &str| -> Result<()> {
        bail!(rpc_error!(ECONNREFUSED, "no server at {}: {why}", path.display()))
    };
    let process = line.pid.map(ServerProcess::open).transpose()?;
    let mut evidence = Evidence { first: identity(&path).ok(), suspect: None, is_lost: false };
    loop {
        // The process is checked before the connection attempt, because another server may respond at the same path.
        if let Some(process) = &process
            && process.has_ended()?
        {
            return ended(&format!("process {} has ended", process.pid));
        }
        let left = end.saturating_duration_since(Instant::now());
        let socket = identity(&path).ok();
        let state = match attempt(common, left.max(POLL_INTERVAL))? {
            Attempt::Ready(client) => return show(&client, common),
            Attempt::NotReady(state) => state,
        };
        if evidence.is_of_death(&state, socket) {
            return ended("the server has died or is shutting down");
        }
        if left.is_zero() {
            return Err(timeout_error(state, socket, &path, timeout));
        }
        thread::sleep(POLL_INTERVAL.min(left));
    }
}

/// Returns the error for a server that did not become ready within the timeout.
fn timeout_error(state: State, socket: Option<Identity>, path: &Path, timeout: Duration) -> anyhow::Error {
    let at = path.display();
    let why = match (state, socket) {
        (State::Unreachable(_), Some(_)) => {
            format!(
                "no server at {at}: a server that has died left the socket; waited {timeout:?} for another"
            )
        }
        (State::Unreachable(error) | State::Lost(error) | State::Silent(error), _) => {
            format!("{error:#}; waited {timeout:?} for it")
        }
    };
    rpc_error!(ETIMEDOUT, "{why}").into()
}

/// Result of one attempt to connect to the control socket and call a verb.
enum Attempt {
    /// The server responded, over this connection.
    Ready(Client),
    /// The server did not respond, for this reason.
    NotReady(State),
}

/// Reason why a server does not respond.
enum State {
    /// The socket does not exist, or no process listens at the socket.
    Unreachable(anyhow::Error),
    /// The server accepted the connection, but closed it without a response.
    Lost(anyhow::Error),
    /// The server accepted the connection, but did not respond in time.
    Silent(anyhow::Error),
}

/// Evidence from the connection attempts so far that a server has died.
struct Evidence {
    /// The socket at the begin of the wait. If no process listens at this socket, a killed server left it.
    /// The server that is waited for replaces it.
    first: Option<Identity>,
    /// A later socket at which no process listened in the last attempt. A single attempt proves nothing,
    /// because a server binds its socket before it listens.
    suspect: Option<Identity>,
    /// True if a server closed the connection without a response.
    is_lost: bool,
}

impl Evidence {
    /// Adds the result of an attempt. Returns true if a server responded at the socket before and is gone now. `socket`
    /// is the socket before the attempt, because afterwards the next server may have replaced it.
    fn is_of_death(&mut self, state: &State, socket: Option<Identity>) -> bool {
        match state {
            State::Unreachable(_) => {
                let suspect = socket.filter(|_| socket != self.first);
                let is_dead = self.is_lost || suspect.is_some() && suspect == self.suspect;
                self.suspect = suspect;
                is_dead
            }
            State::Lost(_) => {
                self.is_lost = true;
                false
            }
            // The server at the socket now is not the one that closed the connection.
            State::Silent(_) => {
                self.is_lost = false;
                false
            }
        }
    }
}

/// The server process named by `--pid`.
struct ServerProcess {
    pid: i32,
    /// File descriptor of the process; None if the process had ended before the wait began.
    handle: Option<OwnedFd>,
}

impl ServerProcess {
    fn open(pid: i32) -> Result<Self> {
        let handle = match Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            None | Some(Err(Os::SRCH)) => None,
            Some(handle) => Some(handle.with_context(|| format!("--pid {pid}: cannot watch the process"))?),
        };
        Ok(Self { pid, handle })
    }

    /// Returns true if the process has ended, even if its parent has not collected its status yet.
    fn has_ended(&self) -> Result<bool> {
        let Some(handle) = &self.handle else { return Ok(true) };
        let ended = pidfd::wait(handle, Some(Duration::ZERO));
        ended.with_context(|| format!("--pid {}: cannot watch the process", self.pid))
    }
}

/// Connects to the server and calls the verb with the least cost. A server binds its socket after all devices
/// exist, and is ready when it responds.
///
/// # Errors
/// No server can become ready at this control socket, so that waiting is useless.
fn attempt(common: &Common, time: Duration) -> Result<Attempt> {
    let mut client = match Client::connect(common.control.as_deref()) {
        Ok(client) => client,
        Err(error)
            if error.downcast_ref::<RpcError>().is_some_and(|fault| fault.has_errno(Errno::ECONNREFUSED)) =>
        {
            return Ok(Attempt::NotReady(State::Unreachable(error)));
        }
        Err(error) => return Err(error),
    };
    client.set_timeout(time)?;
    match client.call(list::List::METHOD, &json!({ "pattern": "" })) {
        Ok(_) => Ok(Attempt::Ready(client)),
        Err(error) if error.is::<RpcError>() => Err(error),
        Err(error) if is_timeout(&error) => Ok(Attempt::NotReady(State::Silent(error))),
        Err(error) => Ok(Attempt::NotReady(State::Lost(error))),
    }
}

fn is_timeout(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|cause| matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
}

fn show(client: &Client, common: &Common) -> Result<()> {
    if common.json {
        let ready = json!({ "control": path_text::text(client.path()) });
        writeln!(io::stdout(), "{ready:#}").map_err(Stdout::from)?;
    }
    Ok(())
}
