//! `wait`: until a server is ready.

use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_spec::times;
use serde_json::json;

use super::{Common, Verb as _, jobs, list, print_json};
use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::error::Stdout;
use crate::job::Shown;

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The same of a verb that takes long.
const LOOK_MAX: Duration = Duration::from_millis(200);
/// How long a server is waited for.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Give up after so long: a whole number with ms, s, m or h [default: 10s; with --job, never]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    timeout: Option<Duration>,
    /// Until the verb in the background that has this number has ended
    #[arg(long, value_name = "NUMBER")]
    job: Option<u64>,
}

/// Waits. What keeps a server from ever being found there is told at once.
pub fn wait(line: &Line, common: &Common) -> Result<()> {
    match line.job {
        Some(job) => wait_for_job(job, line.timeout, common),
        None => wait_until_ready(line.timeout.unwrap_or(TIMEOUT_DEFAULT), common),
    }
}

/// What a verb failed with is told as if it had run in the foreground.
fn wait_for_job(job: u64, timeout: Option<Duration>, common: &Common) -> Result<()> {
    let end = timeout.map(|timeout| Instant::now() + timeout);
    let mut client = Client::connect(common.control.as_deref())?;
    let mut pause = LOOK_EVERY;
    loop {
        let answer = client.call(jobs::AllJobs::METHOD, &json!({ "job": job }))?;
        let reply: jobs::Reply =
            serde_json::from_str(answer.get()).context("jobs: the server's answer is not understood")?;
        let shown = reply.jobs.first().filter(|shown| shown.has_ended());
        if let Some(Shown { error: Some(fault), .. }) = shown {
            return Err(fault.clone().into());
        }
        if let Some(shown) = shown {
            let shown = serde_json::to_string(&shown).context("cannot write the answer")?;
            return if common.json { print_json(&shown) } else { Ok(()) };
        }
        let left = end.map_or(pause, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            let why = format!("job {job}: has not ended; waited {:?} for it", timeout.unwrap_or_default());
            return Err(Fault::failed(Errno::ETIMEDOUT, why).into());
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LOOK_MAX);
    }
}

fn wait_until_ready(timeout: Duration, common: &Common) -> Result<()> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match look(common, left.max(LOOK_EVERY)) {
            Ok(client) => return show(&client, common),
            Err(error) if !is_absent(&error) => return Err(error),
            Err(error) if left.is_zero() => {
                let why = format!("{error:#}; waited {timeout:?} for it");
                return Err(Fault::failed(Errno::ETIMEDOUT, why).into());
            }
            Err(_) => thread::sleep(LOOK_EVERY.min(left)),
        }
    }
}

/// The socket is bound when all else is ready; that it also answers is asked with the least there
/// is to ask.
fn look(common: &Common, time: Duration) -> Result<Client> {
    let mut client = Client::connect(common.control.as_deref())?;
    client.answers_within(time)?;
    match client.call(list::List::METHOD, &json!({ "pattern": "" })) {
        Err(error) if !error.is::<Fault>() => {
            // One that ends, or hangs: the next one may do better.
            Err(Fault::failed(Errno::ECONNREFUSED, format!("{error:#}")).into())
        }
        answer => answer.map(|_| client),
    }
}

fn is_absent(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Fault>().is_some_and(|fault| fault.is(Errno::ECONNREFUSED))
}

fn show(client: &Client, common: &Common) -> Result<()> {
    if common.json {
        let ready = json!({ "control": path_text::text(client.path()) });
        writeln!(io::stdout(), "{ready:#}").map_err(Stdout::from)?;
    }
    Ok(())
}
