//! `cancel NAME [VERB]`: cancels the jobs of a device, or only those of one verb.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;

use crate::jobs::JobFilter;
use crate::service::Service;
use crate::verbs::Verb;
use crate::verbs::jobs::jobs::{Reply, unknown_job};

pub struct Cancel;

/// Command line of the verb `cancel`.
#[derive(Debug, Args)]
pub struct Line {
    /// The device; for a restore, the path of its file
    #[arg(required_unless_present = "job", conflicts_with = "job")]
    name: Option<String>,
    /// Only this command [default: all jobs of the device]
    #[arg(conflicts_with = "job")]
    verb: Option<String>,
    /// Cancel the job with this number
    #[arg(long, value_name = "NUMBER")]
    job: Option<u64>,
}

impl From<Line> for JobFilter {
    fn from(Line { name, verb, job }: Line) -> Self {
        Self { name, verb, job, tag: None }
    }
}

impl Verb for Cancel {
    const METHOD: &'static str = "cancel";
    const READ_ONLY: bool = false;
    type Params = JobFilter;
    type Reply = Reply;

    // No device is claimed (locked against other verbs), and the verb does not wait until the jobs have ended.
    fn run(service: &Service, filter: JobFilter) -> Result<Reply, RpcError> {
        if filter == JobFilter::default() {
            refuse!(invalid, "cancel: name, job or tag: one must be given");
        }
        let jobs = service.jobs.cancel(&filter)?;
        match (jobs.as_slice(), filter.job, &filter.name) {
            ([], Some(job), _) => Err(unknown_job(job)),
            ([], None, Some(name)) => {
                let verb = filter.verb.as_ref().map_or_else(String::new, |verb| format!("{verb}: "));
                Err(rpc_error!(ENODEV, "{name}: {verb}no job is running"))
            }
            _ => Ok(Reply { jobs }),
        }
    }

    fn show(_: &JobFilter, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.jobs.iter().try_for_each(|job| {
            // A cancelled job that has ended already was waiting in the queue.
            let done = if job.has_ended() { "cancelled before it started" } else { "is being cancelled" };
            writeln!(out, "job {}: {}: {}: {done}", job.job, job.name, job.verb)
        })
    }
}
