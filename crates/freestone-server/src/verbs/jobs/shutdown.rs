//! `shutdown`: ends the server like SIGTERM. The client waits until the process of the server has ended.

use std::io::{self, Write};

use freestone_control::protocol::RpcError;
use serde::{Deserialize, Serialize};

use crate::persistence::saves::Saves;
use crate::service::Service;
use crate::verbs::Verb;

pub struct Shutdown;

/// Parameters of the verb `shutdown` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    #[serde(default)]
    force: bool,
}

/// Result of the verb `shutdown`: the server has begun to shut down.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// Process ID of the server.
    pid: u32,
}

impl Verb for Shutdown {
    const METHOD: &'static str = "shutdown";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let unfit = if params.force { Vec::new() } else { Saves::space_warnings(service) };
        if !unfit.is_empty() {
            refuse!(ENOSPC, "{}; --force ends the server all the same", unfit.join("; "));
        }
        let Some(end) = service.end.get() else {
            refuse!(EBUSY, "the server is still starting");
        };
        end();
        Ok(Reply { pid: std::process::id() })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
