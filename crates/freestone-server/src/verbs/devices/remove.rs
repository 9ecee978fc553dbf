//! `remove NAME...`: unpublishes and removes devices.

use std::io::{self, Write};

use clap::Args;
use freestone::cow::MergeStatus;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::Entry;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::changes::recording::Recording;
use crate::jobs::JobKind;
use crate::service::Service;
use crate::verbs::Verb;
use crate::verbs::devices::Target;

pub struct Remove;

/// Command line of the verb `remove`.
#[derive(Debug, Args)]
pub struct Line {
    /// Names or patterns (* matches any characters, ? one); content in memory is lost
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Continue even if clients are connected; their connections are closed
    #[arg(long)]
    force: bool,
}

impl Line {
    /// Returns the parameters of the request for the device `name`.
    pub fn of(&self, name: &str) -> Target {
        Target { name: name.to_owned(), force: self.force }
    }
}

/// Fails if the device is a snapshot that is partly merged into its origin, because only this snapshot can
/// complete the merge.
fn check_merged(entry: &Entry) -> Result<(), RpcError> {
    let (Some(snapshot), name) = (entry.kind.cow(), entry.name()) else { return Ok(()) };
    match snapshot.merge_status() {
        MergeStatus::None | MergeStatus::Finished => Ok(()),
        _ => {
            let origin = entry.spec.kind.parent_name().unwrap_or_default();
            let why = format!("{name}: its merge into {origin} is not finished: freestone merge {name}");
            Err(rpc_error!(EBUSY, "{why} --into-origin"))
        }
    }
}

/// Result of the verb `remove`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of client connections that were closed.
    connections_ended: usize,
}

impl Verb for Remove {
    const METHOD: &'static str = "remove";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Target;
    type Reply = Reply;

    fn run(service: &Service, params: Target) -> Result<Reply, RpcError> {
        let name = params.name;
        let claim = service.claim(Self::METHOD, &name)?;
        if service.registry.find(&name).is_none() && service.records.why_missing(&name).is_some() {
            let mut recording = Recording::begin(service, &claim, Self::METHOD, &[&name])?;
            recording.forget_missing();
            recording.commit()?;
            return Ok(Reply { name, connections_ended: 0 });
        }
        let entry = service.find(&name)?;
        check_merged(&entry)?;
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&name])?;
        let job = service.jobs.begin_on(&[&name], Self::METHOD, JobKind::CONCURRENT_UNCANCELLABLE)?;
        let leaves = service.pending_removals.begin(&name);
        let connections_ended = service.remove(&claim, &entry, params.force)?;
        recording.commit().map_err(|fault| {
            // The device stays in the list of missing devices, so that the verb can be repeated.
            service.records.add_missing(&name, "is removed, but not for the next start; remove it again");
            let message = format!("{name}: is removed, but not for the next start: {}", fault.message);
            RpcError { message, ..fault }
        })?;
        drop(claim);
        job.respond_started(json!({ "connections_ended": connections_ended }));
        // The claim is released before, because freeing a large device and flushing a file take long.
        let family = entry.kind.own_family();
        drop(entry);
        if let Some(family) = family {
            family.release(&mut |done, total| job.report(done, total));
        }
        drop(leaves);
        Ok(Reply { name, connections_ended })
    }

    fn show(_: &Target, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
