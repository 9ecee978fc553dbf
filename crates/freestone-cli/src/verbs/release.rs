//! `release NAME`: lets go of the requests that hang by a rule of `faults`.

use std::io::{self, Write};

use clap::Args;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::service::Service;

/// The verb.
pub struct Release;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A device with faults
    name: String,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// How many hung.
    released: u64,
}

impl Verb for Release {
    const METHOD: &'static str = "release";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // Claims nothing: who has the device may wait for just these requests.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let entry = service.find(&name)?;
        let Some(faults) = &entry.layers.faults else {
            let why = format!("{name}: nothing hangs there: it was created without faults");
            return Err(Fault::failed(Errno::EOPNOTSUPP, why));
        };
        Ok(Reply { name, released: faults.release() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} let go", reply.name, reply.released)
    }
}
