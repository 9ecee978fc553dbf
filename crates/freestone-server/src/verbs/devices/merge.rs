//! `merge SNAPSHOT --into-origin`: merges a snapshot that has a COW device into its origin.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use freestone::cow::{MergeSetupError, MergeStatus, Snapshot, Status};
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::devices::claims::Claim;
use crate::jobs::{Job, JobKind};
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;

/// Size of a sector in bytes. dm-snapshot reports its status in sectors.
const SECTOR_BYTES: u64 = 512;
/// Maximum interval between polls of the merge's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum wait for a merge to stop. The merge first finishes the chunks in flight, and a disk may hang.
const STOP_MAX: Duration = Duration::from_secs(10);

pub struct Merge;

/// Parameters of the verb `merge`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A snapshot of a file with a persistent store (P or PO)
    pub name: String,
    /// Confirm that the origin's current content is replaced
    #[arg(long)]
    #[serde(default)]
    into_origin: bool,
    /// Merge even if clients of the origin are connected; they see the snapshot's content at once
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

impl Params {
    /// Checks the confirmation before the server is called.
    pub fn checked(self) -> Result<Self, Usage> {
        self.check().map_err(|fault| Usage(fault.message))?;
        Ok(self)
    }

    fn check(&self) -> Result<(), RpcError> {
        if self.into_origin {
            return Ok(());
        }
        let name = &self.name;
        refuse!(
            invalid,
            "{name}: merge: overwrites the origin with the content of the snapshot; confirm with --into-origin"
        )
    }
}

/// Result of the verb `merge`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    origin: String,
    /// State of the merge: `finished`, or `running` if the merge has only begun.
    merge: String,
    /// Status of the snapshot as in dm-snapshot: `allocated/total metadata`, in sectors.
    status: String,
}

/// Claims (locks against other verbs) a snapshot and its origin, and returns the entry of the snapshot.
fn claim<'a>(service: &'a Service, name: &str) -> Result<(Claim<'a>, Arc<Entry>), RpcError> {
    let found = service.find(name)?;
    let mut names = vec![name];
    if let (Some(_), Some(origin)) = (found.kind.cow(), found.spec.kind.parent_name()) {
        names.push(origin);
    }
    let claim = service.claim_all(Merge::METHOD, &names)?;
    let entry = service.find(name)?;
    if !Arc::ptr_eq(&entry, &found) {
        refuse!(EBUSY, "{name}: merge: was replaced by another device meanwhile");
    }
    Ok((claim, entry))
}

impl Verb for Merge {
    const METHOD: &'static str = "merge";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // No device is claimed (locked against other verbs) during the wait, because a merge takes as long as the
    // disks need.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        params.check()?;
        let name = params.name.clone();
        let failed = |errno, why: String| RpcError::failed(errno, format!("{name}: merge: {why}"));
        let (entry, origin, job, began) = {
            let (_claim, entry) = claim(service, &name)?;
            let Some(snapshot) = entry.kind.cow() else {
                let why = match entry.kind.memory_snapshot() {
                    Some(_) => "a snapshot in memory is not merged; fork it".to_owned(),
                    None => {
                        format!(
                            "{} device is not a snapshot with a COW device",
                            with_article(entry.kind.name())
                        )
                    }
                };
                return Err(failed(Errno::EOPNOTSUPP, why));
            };
            let origin = entry.spec.kind.parent_name().unwrap_or_default().to_owned();
            // The merge changes the origin, and would thereby change the content of devices that depend on
            // the snapshot.
            service.registry.check_unused(&entry, "merged")?;
            if !params.force && snapshot.merge_status() == MergeStatus::None {
                service.exports.check_idle(&*service.find(&origin)?)?;
            }
            // If the merge is running already, this job only waits for its end.
            let began = snapshot.merge_status() != MergeStatus::Running;
            let kind = if began { JobKind::EXCLUSIVE } else { JobKind::CONCURRENT };
            let job = service.jobs.begin_on(&[&name], Self::METHOD, kind)?;
            snapshot.merge().map_err(|error| {
                let errno = match error {
                    MergeSetupError::OtherMerge | MergeSetupError::Preparing => Errno::EBUSY,
                    MergeSetupError::FreezeTimeout(_) => Errno::ETIMEDOUT,
                    MergeSetupError::Thread(_) => Errno::ENOMEM,
                    _ => Errno::EINVAL,
                };
                failed(errno, error.to_string())
            })?;
            (entry, origin, job, began)
        };
        let Some(snapshot) = entry.kind.cow() else { unreachable!("checked above") };
        job.respond_started(json!({
            "origin": origin,
            "merge": kinds::merge(&snapshot.merge_status()),
            "status": snapshot.status().to_string(),
        }));
        let is_stopping = wait_merge(snapshot, &job, began);
        let status = snapshot.merge_status();
        match &status {
            MergeStatus::Finished => {}
            MergeStatus::Running if is_stopping => {
                return Err(job.cancelled("the merge stops when its disks have answered"));
            }
            MergeStatus::Running => return Err(job.cancelled("the merge goes on")),
            _ if job.should_stop() => {
                return Err(job.cancelled("what is merged stays; repeat the command to continue"));
            }
            MergeStatus::Failed(why) => {
                return Err(failed(Errno::EIO, format!("{why}; repeat the command to continue")));
            }
            MergeStatus::None | MergeStatus::Stopped => {
                return Err(failed(Errno::EBUSY, "was stopped; repeat the command to continue".into()));
            }
        }
        let merge = kinds::merge(&status).and_then(|text| text.as_str().map(str::to_owned));
        let status = snapshot.status().to_string();
        Ok(Reply { name, origin, merge: merge.unwrap_or_default(), status })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, origin, .. } = reply;
        writeln!(out, "{name}: is merged into {origin}; `freestone remove {name}` forgets it")
    }

    fn show_begun(begun: &Map<String, Value>, out: &mut dyn Write) -> io::Result<()> {
        let text = |key: &str| begun.get(key).and_then(Value::as_str).unwrap_or_default();
        let job = begun.get("job").unwrap_or_default();
        let (name, origin, status) = (text("name"), text("origin"), text("status"));
        writeln!(out, "{name}: is being merged into {origin}; status {status}; job {job}")
    }
}

/// Waits for the end of a merge. If the job must end, requests that the merge stops, and returns true. If
/// another job began the merge (`began` is false), only a cancellation by a client stops the merge.
fn wait_merge(snapshot: &Snapshot, job: &Job, began: bool) -> bool {
    let left = || match snapshot.status() {
        Status::Usage(usage) => usage.allocated.saturating_sub(usage.metadata) * SECTOR_BYTES,
        _ => 0,
    };
    let total = left();
    let mut give_up = None;
    while snapshot.merge_status() == MergeStatus::Running {
        if !job.advance(total.saturating_sub(left()), total) {
            if !began && !job.is_cancelled() {
                return false;
            }
            snapshot.request_merge_stop();
            // The merge may not stop, because a disk hangs.
            if *give_up.get_or_insert_with(|| Instant::now() + STOP_MAX) <= Instant::now() {
                return true;
            }
        }
        thread::sleep(POLL_INTERVAL.min(Duration::from_millis(5 + total / (64 << 20))));
    }
    give_up.is_some()
}
