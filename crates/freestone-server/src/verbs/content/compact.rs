//! `compact NAME`: moves the compressed pages of a RAM disk together, and frees the memory pages that become empty.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::verbs::Verb;

pub struct Compact;

/// Parameters of the verb `compact`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The ram device
    name: String,
}

/// Result of the verb `compact`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of memory pages that were freed.
    pages_freed: u64,
}

impl Verb for Compact {
    const METHOD: &'static str = "compact";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because it may be in use and the verb may take long.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name;
        let ram = service.find_ram(&name, "can be compacted")?;
        let job = service.jobs.begin(&name, Self::METHOD, JobKind::CONCURRENT)?;
        let pages_freed = ram.compact_with_progress(&mut |done, total| job.advance(done, total));
        if job.should_stop() {
            let after = format!("{pages_freed} pages were freed before");
            return Err(job.cancelled(&after).with("pages_freed", pages_freed));
        }
        Ok(Reply { name, pages_freed })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} pages freed", reply.name, reply.pages_freed)
    }
}
