//! `remove NAME...`: unpublishes a device and forgets it.

use std::io::{self, Write};

use clap::Args;
use freestone::cow::MergeStatus;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Verb;
use crate::control::protocol::Fault;
use crate::job::Kind;
use crate::recording::Recording;
use crate::service::Service;

/// The verb.
pub struct Remove;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Devices, by name or pattern (* stands for any characters, ? for one); what they hold in
    /// memory is gone with them
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Also where clients are connected; they are cut off
    #[arg(long)]
    force: bool,
}

impl Line {
    /// What is asked for one of the devices.
    pub fn of(&self, name: &str) -> Params {
        Params { name: name.to_owned(), force: self.force }
    }
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    #[serde(default)]
    force: bool,
}

/// Refuses to forget a snapshot that is half in its origin.
fn check_merged(entry: &Entry) -> Result<(), Fault> {
    let (Some(snapshot), name) = (entry.kind.cow(), entry.name()) else { return Ok(()) };
    match snapshot.merge_status() {
        MergeStatus::None | MergeStatus::Finished => Ok(()),
        _ => {
            let origin = entry.spec.kind.below().unwrap_or_default();
            let why = format!("{name}: its merge into {origin} is not finished: freestone merge {name}");
            Err(Fault::failed(Errno::EBUSY, format!("{why} --into-origin")))
        }
    }
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
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
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
        let job = service.jobs.begin_on(&[&name], Self::METHOD, Kind::WHOLE_BESIDE)?;
        let leaves = service.leaving.begin(&name);
        let connections_ended = service.remove(&claim, &entry, params.force)?;
        recording.commit().map_err(|fault| {
            // So that another `remove` is not told that there is no such device.
            service.records.miss(&name, "is removed, but not for the next start; remove it again");
            let message = format!("{name}: is removed, but not for the next start: {}", fault.message);
            Fault { message, ..fault }
        })?;
        drop(claim);
        job.tell(json!({ "connections_ended": connections_ended }));
        // To give back a large device takes time, and a file is flushed: nobody else waits for
        // that.
        let family = entry.kind.own_family();
        drop(entry);
        if let Some(family) = family {
            family.give_back(&mut |done, total| job.note(done, total));
        }
        drop(leaves);
        Ok(Reply { name, connections_ended })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
