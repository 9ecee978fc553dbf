//! `jobs [NAME]`: lists running jobs, and background jobs that are queued or have ended.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use crate::jobs::{JobFilter, JobInfo};
use crate::service::Service;
use crate::verbs::Verb;

pub struct AllJobs;

/// Command line of the verb `jobs`.
#[derive(Debug, Args)]
pub struct Line {
    /// Only jobs of this device; for a restore, the path of its file
    name: Option<String>,
}

impl From<Line> for JobFilter {
    fn from(line: Line) -> Self {
        Self { name: line.name, ..Self::default() }
    }
}

/// Result of the verb `jobs`: the jobs, in the order of their numbers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    pub jobs: Vec<JobInfo>,
}

impl Verb for AllJobs {
    const METHOD: &'static str = "jobs";
    const READ_ONLY: bool = true;
    type Params = JobFilter;
    type Reply = Reply;

    // No device is claimed (locked against other verbs).
    fn run(service: &Service, filter: JobFilter) -> Result<Reply, RpcError> {
        let jobs = service.jobs.list(&filter);
        match filter.job {
            Some(job) if jobs.is_empty() => Err(unknown_job(job)),
            _ => Ok(Reply { jobs }),
        }
    }

    fn show(_: &JobFilter, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.jobs.iter().try_for_each(|job| writeln!(out, "{}", job_line(job)))
    }
}

/// Returns the error for the number of a job that does not exist, or that has ended and whose record was removed later.
pub fn unknown_job(job: u64) -> RpcError {
    rpc_error!(ENODEV, "job {job}: no such job, or one that ended long ago")
}

/// Returns the line about a job, such as `job 3: ram0: save: running, 1.2G of 4.0G, 30 %, 12.5 s`.
fn job_line(job: &JobInfo) -> String {
    let JobInfo { job: number, name, verb, state, done_bytes, total_bytes, seconds, .. } = job;
    let background = if job.background && !job.has_ended() { " in the background" } else { "" };
    let progress = if *total_bytes > 0 {
        let percent = done_bytes.saturating_mul(100) / total_bytes;
        format!(", {} of {}, {percent} %", human(*done_bytes), human(*total_bytes))
    } else {
        String::new()
    };
    let why = job.error.as_ref().map_or_else(String::new, |fault| format!("; {}", fault.message));
    format!("job {number}: {name}: {verb}: {state}{background}{progress}, {seconds:.1} s{why}")
}
