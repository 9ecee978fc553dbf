//! `trace NAME`: stores the list of the chunks of an image that were read first, for prefetching.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use freestone::store::objects::Until;
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::of_store;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::service::Service;

/// Longest wait for the store.
const TIME_MAX: Duration = Duration::from_secs(60);

pub struct Trace;

/// Parameters of the request, also the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The image device
    name: String,
}

/// Result of the verb.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of chunks (512 KiB each) in the trace.
    chunks: usize,
}

impl Verb for Trace {
    const METHOD: &'static str = "trace";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // Claims nothing: the verb waits for the network.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let entry = service.find(&name)?;
        let Some(pulled) = entry.kind.stored() else {
            let why = format!("{name}: trace: {} device has none; images do", a_kind(entry.kind.name()));
            return Err(Fault::failed(Errno::EOPNOTSUPP, why));
        };
        let pushed = pulled.image.push_trace(Until::within(TIME_MAX));
        let chunks = pushed.map_err(|error| Fault::from(of_store(&error).of(&format!("{name}: trace"))))?;
        Ok(Reply { name, chunks })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, chunks } = reply;
        writeln!(out, "{name}: trace of {chunks} chunks stored; they are prefetched when the image is opened")
    }
}
