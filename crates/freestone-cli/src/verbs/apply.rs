//! `apply FILE`: makes a server that runs what a file says.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Verb;
use super::delta::absolute;
use crate::apply::{Extent, apply};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::service::Service;

/// The verb.
pub struct Apply;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// As for serve --config; the server reads it
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Only say what would change
    #[arg(long)]
    #[serde(default)]
    check: bool,
    /// Also remove devices and exports that no file has declared
    #[arg(long)]
    #[serde(default)]
    prune: bool,
    /// Also where clients are connected; they are cut off
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

impl Params {
    /// Makes the path independent of our directory.
    pub fn checked(self) -> Result<Self, Usage> {
        let file = absolute("apply", &self.file)?;
        Ok(Self { file, ..self })
    }
}

/// What changed, in order; of a check, what would.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    changes: Vec<String>,
}

impl Verb for Apply {
    const METHOD: &'static str = "apply";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { file, check, prune, force } = params;
        Ok(Reply { changes: apply(service, &file, Extent { prune, force, check, adds: false })? })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        if reply.changes.is_empty() {
            writeln!(out, "nothing changes")?;
        }
        reply.changes.iter().try_for_each(|change| writeln!(out, "{change}"))
    }
}
