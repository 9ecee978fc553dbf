//! `unpublish NAME [--at ADDRESS]`: removes all exports of a device, or the one at an address.

use std::io::{self, Write};
use std::sync::Arc;

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::Entry;
use serde::{Deserialize, Serialize};

use crate::changes::recording::Recording;
use crate::devices::claims::Claim;
use crate::exports::export_spec::ExportSpec;
use crate::exports::{DeviceExports, Export};
use crate::service::Service;
use crate::verbs::Verb;

pub struct Unpublish;

/// Parameters of the verb `unpublish`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device, which keeps its content
    name: String,
    /// Continue even if clients are connected; their connections are closed
    #[arg(long)]
    #[serde(default)]
    force: bool,
    /// Only this address, as `list` shows it [default: all addresses]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<String>,
}

/// Result of the verb `unpublish`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of client connections that were closed.
    connections_ended: usize,
}

impl Verb for Unpublish {
    const METHOD: &'static str = "unpublish";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name;
        let claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if let Some(at) = &params.at {
            return unpublish_at(service, &claim, &entry, at, params.force);
        }
        let exports = &service.exports;
        if exports.read(&name, DeviceExports::is_unpublished) {
            refuse!(EINVAL, "{name}: not published");
        }
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&name])?;
        let connections_ended = exports.unpublish(&claim, &entry, params.force)?;
        exports.release_defaults(&name);
        recording.commit()?;
        Ok(Reply { name, connections_ended })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Removes the export of a device at one address.
fn unpublish_at(
    service: &Service,
    claim: &Claim<'_>,
    entry: &Arc<Entry>,
    at: &str,
    force: bool,
) -> Result<Reply, RpcError> {
    let name = entry.name().to_owned();
    let exports = &service.exports;
    let is_at =
        |wanted: &ExportSpec| exports.find(&name, &wanted.address).is_some_and(|live| live.address() == at);
    let Some(ExportSpec { address: place, .. }) = exports.specs(&name).into_iter().find(is_at) else {
        let why = "not published there, or at an address of the command line";
        refuse!(EINVAL, "{name}: unpublish: {at}: {why}; `freestone list` shows where it is");
    };
    let recording = Recording::begin(service, claim, Unpublish::METHOD, &[&name])?;
    let connections = |export: Export| if export.address == at { export.connections } else { 0 };
    let connections_ended = exports.of(&name).into_iter().map(connections).sum();
    exports.unpublish_from(claim, entry, &place, force)?;
    recording.commit()?;
    Ok(Reply { name, connections_ended })
}
