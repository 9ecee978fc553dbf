//! `unpublish NAME`: takes a device off all its addresses.

use std::io::{self, Write};

use clap::Args;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::recording::Recording;
use crate::service::Service;

/// The verb.
pub struct Unpublish;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device; it stays, with its content
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

impl Verb for Unpublish {
    const METHOD: &'static str = "unpublish";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        let exports = &service.exports;
        let is_published = !exports.of(&name).is_empty()
            || !exports.absent.of(&name).is_empty()
            || !exports.absent.unread(&name).is_empty();
        if !is_published && !service.withheld.has(&name) {
            return Err(Fault::failed(Errno::EINVAL, format!("{name}: not published")));
        }
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&name])?;
        let connections_ended = service.exports.unpublish(&claim, &entry, params.force)?;
        // There is nothing left to be withheld.
        let _ = service.withheld.take(&name);
        service.exports.defaults.release(&name);
        service.declarations.forget_exports(&name);
        recording.commit()?;
        Ok(Reply { name, connections_ended })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
