//! `reset NAME`: wipes a ram or null device.

use std::io::{self, Write};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::{Errno, Fault};
use crate::registry::Kind;
use crate::service::Service;

/// The verb.
pub struct Reset;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device, ram or null
    name: String,
    /// Also where clients are connected; they stay, and read zeroes from then on
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
}

impl Verb for Reset {
    const METHOD: &'static str = "reset";
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let _changes = service.changes();
        let entry = service.find(&name)?;
        if let Kind::File(_) = entry.kind {
            let why = "a file device is not reset; only ram and null devices are";
            return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: {why}")));
        }
        if !params.force {
            service.check_idle(&name)?;
        }
        if let Kind::Ram(ram) = &entry.kind {
            ram.reset().map_err(|e| Fault::failed(Errno::EROFS, format!("{name}: {e}")))?;
        }
        // A null device keeps nothing that could be wiped.
        Ok(Reply { name })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
