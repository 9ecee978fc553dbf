//! `merge SNAPSHOT --into-origin`: what a file's snapshot holds goes back into the file.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use freestone::cow::{MergeSetupError, MergeStatus, Status};
use freestone_spec::kinds;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::service::Service;

/// Bytes of a sector, dm's unit.
const SECTOR_BYTES: u64 = 512;
/// How often progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The verb.
pub struct Merge;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A snapshot of a file with a persistent store (P or PO)
    pub name: String,
    /// Says that the origin's present content may go
    #[arg(long)]
    #[serde(default)]
    into_origin: bool,
    /// Answer when it has begun; `freestone stat NAME` shows how far it is
    #[arg(long)]
    #[serde(default)]
    background: bool,
    /// Also where clients of the origin are connected; they see the snapshot's content from then on
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

impl Params {
    /// Checks what the words alone can tell.
    pub fn checked(self) -> Result<Self, Usage> {
        self.check().map_err(|fault| Usage(fault.message))?;
        Ok(self)
    }

    fn check(&self) -> Result<(), Fault> {
        if self.into_origin {
            return Ok(());
        }
        let name = &self.name;
        let why = "overwrites the origin with what the snapshot holds; say so with --into-origin";
        Err(Fault::invalid(format!("{name}: merge: {why}")))
    }
}

/// How far it is.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    origin: String,
    /// `running` or `finished`.
    merge: String,
    /// In dm's words: `allocated/total metadata`.
    status: String,
}

/// The right to begin a merge of a snapshot into its origin.
fn claim<'a>(service: &'a Service, name: &str) -> Result<(Claim<'a>, Arc<Entry>), Fault> {
    let found = service.find(name)?;
    let mut names = vec![name];
    if let (Some(_), Some(origin)) = (found.kind.cow(), found.spec.kind.below()) {
        names.push(origin);
    }
    let claim = service.claim_all(Merge::METHOD, &names)?;
    let entry = service.find(name)?;
    if !Arc::ptr_eq(&entry, &found) {
        let why = "merge: was removed and made again at the same time";
        return Err(Fault::failed(Errno::EBUSY, format!("{name}: {why}")));
    }
    Ok((claim, entry))
}

impl Verb for Merge {
    const METHOD: &'static str = "merge";
    type Params = Params;
    type Reply = Reply;

    // Takes as long as the disks do: waits with nothing claimed.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        params.check()?;
        let name = params.name.clone();
        let failed = |errno, why: String| Fault::failed(errno, format!("{name}: merge: {why}"));
        let (entry, origin) = {
            let (_claim, entry) = claim(service, &name)?;
            let Some(snapshot) = entry.kind.cow() else {
                let why = match entry.kind.memory_snapshot() {
                    Some(_) => "a snapshot in memory is not merged; fork it".to_owned(),
                    None => format!("a {} device is no snapshot of a file", entry.kind.name()),
                };
                return Err(failed(Errno::EOPNOTSUPP, why));
            };
            let origin = entry.spec.kind.below().unwrap_or_default().to_owned();
            // What they show would change with the origin.
            service.registry.check_unused(&entry, "merged")?;
            if !params.force && snapshot.merge_status() == MergeStatus::None {
                service.check_idle(&*service.find(&origin)?)?;
            }
            snapshot.merge().map_err(|error| {
                let errno = match error {
                    MergeSetupError::Other | MergeSetupError::Preparing => Errno::EBUSY,
                    MergeSetupError::NotInTime(_) => Errno::ETIMEDOUT,
                    MergeSetupError::Thread(_) => Errno::ENOMEM,
                    _ => Errno::EINVAL,
                };
                failed(errno, error.to_string())
            })?;
            (entry, origin)
        };
        let Some(snapshot) = entry.kind.cow() else { unreachable!("looked at above") };
        if !params.background {
            let job = service.jobs.begin(&name, "merge")?;
            let left = || match snapshot.status() {
                Status::Usage(usage) => usage.allocated.saturating_sub(usage.metadata) * SECTOR_BYTES,
                _ => 0,
            };
            let total = left();
            while snapshot.merge_status() == MergeStatus::Running {
                job.at(total.saturating_sub(left()), total);
                std::thread::sleep(LOOK_EVERY.min(Duration::from_millis(5 + total / (64 << 20))));
            }
        }
        let status = snapshot.merge_status();
        match &status {
            MergeStatus::Running | MergeStatus::Finished => {}
            MergeStatus::Failed(why) => {
                return Err(failed(Errno::EIO, format!("{why}; the same command goes on with it")));
            }
            MergeStatus::None | MergeStatus::Stopped => {
                return Err(failed(Errno::EBUSY, "was stopped; the same command goes on with it".into()));
            }
        }
        let merge = kinds::merge(&status).and_then(|text| text.as_str().map(str::to_owned));
        let status = snapshot.status().to_string();
        Ok(Reply { name, origin, merge: merge.unwrap_or_default(), status })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, origin, merge, status } = reply;
        if merge == "running" {
            return writeln!(out, "{name}: is being merged into {origin}; status {status}");
        }
        writeln!(out, "{name}: is merged into {origin}; `freestone remove {name}` forgets it")
    }
}
