//! `cancel NAME [VERB]`: has verbs that take long end early.

use std::io::{self, Write};

use clap::Args;
use freestone_spec::refusal::Errno;

use super::Verb;
use super::jobs::{Reply, none};
use crate::control::protocol::Fault;
use crate::job::Which;
use crate::service::Service;

/// The verb.
pub struct Cancel;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The device; of a restore, the path of its file
    #[arg(required_unless_present = "job", conflicts_with = "job")]
    name: Option<String>,
    /// Only this verb [default: all that run there]
    #[arg(conflicts_with = "job")]
    verb: Option<String>,
    /// The one of this number
    #[arg(long, value_name = "NUMBER")]
    job: Option<u64>,
}

impl From<Line> for Which {
    fn from(Line { name, verb, job }: Line) -> Self {
        Self { name, verb, job, tag: None }
    }
}

impl Verb for Cancel {
    const METHOD: &'static str = "cancel";
    const READ_ONLY: bool = false;
    type Params = Which;
    type Reply = Reply;

    // Nothing is claimed, and nothing waited for.
    fn run(service: &Service, which: Which) -> Result<Reply, Fault> {
        if which == Which::default() {
            return Err(Fault::invalid("cancel: name, job or tag: one must be given"));
        }
        let jobs = service.jobs.cancel(&which)?;
        match (jobs.as_slice(), which.job, &which.name) {
            ([], Some(job), _) => Err(none(job)),
            ([], None, Some(name)) => {
                let verb = which.verb.as_ref().map_or_else(String::new, |verb| format!("{verb}: "));
                Err(Fault::failed(Errno::ENODEV, format!("{name}: {verb}no verb that takes long runs there")))
            }
            _ => Ok(Reply { jobs }),
        }
    }

    fn show(_: &Which, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.jobs.iter().try_for_each(|job| {
            // It waited for its turn.
            let done = if job.has_ended() { "does not begin" } else { "is told to end" };
            writeln!(out, "job {}: {}: {}: {done}", job.job, job.name, job.verb)
        })
    }
}
