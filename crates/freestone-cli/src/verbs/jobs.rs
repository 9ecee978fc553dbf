//! `jobs [NAME]`: the verbs that run, and those of the background that wait or have ended.

use std::io::{self, Write};

use clap::Args;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::job::{Shown, Which};
use crate::service::Service;

/// The verb.
pub struct AllJobs;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Only those of this device; of a restore, the path of its file
    name: Option<String>,
}

impl From<Line> for Which {
    fn from(line: Line) -> Self {
        Self { name: line.name, ..Self::default() }
    }
}

/// In the order in which they began.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    pub jobs: Vec<Shown>,
}

impl Verb for AllJobs {
    const METHOD: &'static str = "jobs";
    const READ_ONLY: bool = true;
    type Params = Which;
    type Reply = Reply;

    // Nothing is claimed.
    fn run(service: &Service, which: Which) -> Result<Reply, Fault> {
        let jobs = service.jobs.all(&which);
        match which.job {
            Some(job) if jobs.is_empty() => Err(none(job)),
            _ => Ok(Reply { jobs }),
        }
    }

    fn show(_: &Which, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.jobs.iter().try_for_each(|job| writeln!(out, "{}", line(job)))
    }
}

/// One that is not known, or not any more.
pub fn none(job: u64) -> Fault {
    Fault::failed(Errno::ENODEV, format!("job {job}: no such job, or one that ended long ago"))
}

/// `job 3: ram0: save: running, 1.2G of 4.0G, 30 %, 12.5 s`
fn line(job: &Shown) -> String {
    let Shown { job: number, name, verb, state, done_bytes, total_bytes, seconds, .. } = job;
    let background = if job.background && !job.has_ended() { " in the background" } else { "" };
    let part = if *total_bytes > 0 {
        let part = done_bytes.saturating_mul(100) / total_bytes;
        format!(", {} of {}, {part} %", human(*done_bytes), human(*total_bytes))
    } else {
        String::new()
    };
    let why = job.error.as_ref().map_or_else(String::new, |fault| format!("; {}", fault.message));
    format!("job {number}: {name}: {verb}: {state}{background}{part}, {seconds:.1} s{why}")
}
