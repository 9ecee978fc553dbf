//! `trace NAME`: stores the list of the chunks that were read first since an image was opened, for prefetching.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use freestone::store::objects::CallLimits;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::of_store;
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::verbs::Verb;

/// Maximum wait for the image store.
const TIME_MAX: Duration = Duration::from_secs(60);

pub struct Trace;

/// Parameters of the verb `trace`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The image device
    name: String,
}

/// Result of the verb `trace`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of chunks (512 KiB each) in the stored list.
    chunks: usize,
}

impl Verb for Trace {
    const METHOD: &'static str = "trace";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because the verb waits for the network.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name;
        let entry = service.find(&name)?;
        let Some(pulled) = entry.kind.stored_image() else {
            refuse!(
                EOPNOTSUPP,
                "{name}: trace: {} device has none; images do",
                with_article(entry.kind.name())
            );
        };
        let pushed = pulled.image.push_trace(CallLimits::within(TIME_MAX));
        let chunks =
            pushed.map_err(|error| RpcError::from(of_store(&error).of(&format!("{name}: trace"))))?;
        Ok(Reply { name, chunks })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, chunks } = reply;
        writeln!(out, "{name}: trace of {chunks} chunks stored; they are prefetched when the image is opened")
    }
}
