//! `remove NAME`: unpublishes a device and forgets it.

use std::io::{self, Write};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::service::Service;

/// The verb.
pub struct Remove;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device; the content of a ram device is gone with it
    name: String,
    /// Also where clients are connected; they are cut off
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// How many connections that ended.
    connections_ended: usize,
}

impl Verb for Remove {
    const METHOD: &'static str = "remove";
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let mut changes = service.changes();
        let entry = service.find(&name)?;
        let connections_ended = if service.exports_of(&name).is_empty() {
            0
        } else {
            service.unpublish(&mut changes, &name, params.force)?
        };
        service.registry.remove(&name);
        drop(changes);
        // To give back a large device takes time, which nobody else waits for.
        drop(entry);
        Ok(Reply { name, connections_ended })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
