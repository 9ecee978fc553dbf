//! `apply FILE`: changes a running server to match a configuration file.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use freestone_control::protocol::RpcError;
use serde::{Deserialize, Serialize};

use crate::changes::apply::{ApplyOptions, apply};
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;
use crate::verbs::content::delta::absolute;

pub struct Apply;

/// Parameters of the verb `apply`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Configuration file, as for serve --config; the server reads it
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Only print what would change
    #[arg(long)]
    #[serde(default)]
    check: bool,
    /// Also remove devices and exports that were not declared in a file
    #[arg(long)]
    #[serde(default)]
    prune: bool,
    /// Continue even if clients are connected; their connections are closed
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

impl Params {
    /// Makes the path of the file absolute, because the server reads the file.
    pub fn checked(self) -> Result<Self, Usage> {
        let file = absolute("apply", &self.file)?;
        Ok(Self { file, ..self })
    }
}

/// Result of the verb `apply`: a description of each change, in order. With `check`, these are the changes
/// that would be made.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    changes: Vec<String>,
}

impl Verb for Apply {
    const METHOD: &'static str = "apply";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { file, check, prune, force } = params;
        Ok(Reply { changes: apply(service, &file, ApplyOptions { prune, force, check, adds: false })? })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        if reply.changes.is_empty() {
            writeln!(out, "nothing changes")?;
        }
        reply.changes.iter().try_for_each(|change| writeln!(out, "{change}"))
    }
}
