//! `release NAME`: releases the requests that a fault rule `hang` holds.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::verbs::Verb;

pub struct Release;

/// Parameters of the verb `release`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A device with faults
    name: String,
}

/// Result of the verb `release`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of requests that were released.
    released: u64,
}

impl Verb for Release {
    const METHOD: &'static str = "release";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because the verb that has claimed it may wait
    // for these requests.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name;
        let entry = service.find(&name)?;
        let Some(faults) = &entry.layers.faults else {
            refuse!(EOPNOTSUPP, "{name}: no held requests: it was created without faults");
        };
        Ok(Reply { name, released: faults.release() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} requests released", reply.name, reply.released)
    }
}
