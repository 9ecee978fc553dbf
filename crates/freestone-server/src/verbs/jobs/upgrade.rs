//! `upgrade`: another program takes the place of the server in its process. The client then asks for the result with
//! `upgrade.outcome`, because no answer can be sent during the upgrade.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use freestone_control::caller::Caller;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use serde::{Deserialize, Serialize};

use crate::jobs::JobFilter;
use crate::service::Service;
use crate::upgrade::UpgradeOutcome;
use crate::verbs::Verb;

pub struct Upgrade;

/// Parameters of the verb `upgrade` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Absolute path of the program; without it, the path of the program that runs.
    #[serde(default)]
    pub program: Option<String>,
    /// Continues although content is lost or jobs are cancelled.
    #[serde(default)]
    pub force: bool,
}

/// Result of the verb `upgrade`: the upgrade has begun.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// Number of the upgrade, for `upgrade.outcome`.
    pub upgrade: u64,
    /// Process ID of the server, which stays the same.
    pub pid: u32,
}

impl Verb for Upgrade {
    const METHOD: &'static str = "upgrade";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Some(begin) = service.upgrades.begin.get() else {
            refuse!(
                EOPNOTSUPP,
                "this server cannot be upgraded: it was started with --run or --single, or within a program"
            );
        };
        if service.records.state().is_none() {
            refuse!(EOPNOTSUPP, "this server cannot be upgraded: it has no state directory (serve --state)");
        }
        if !params.force {
            let why = losses(service);
            if !why.is_empty() {
                refuse!(EBUSY, "{}; --force upgrades the server all the same", why.join("; "));
            }
        }
        let program = match params.program.as_deref().map(path_text::path) {
            Some(_) if !Caller::current().is_privileged() => {
                refuse!(EPERM, "upgrade: only root and the user of the server may name a program")
            }
            Some(path) if path.is_absolute() => path,
            Some(path) => refuse!(EINVAL, "upgrade: {}: is not an absolute path", path.display()),
            None => {
                own_program().map_err(|why| rpc_error!(EIO, "upgrade: cannot find this program: {why}"))?
            }
        };
        let upgrade = service.upgrades.last().0 + 1;
        begin(&program)?;
        Ok(Reply { upgrade, pid: std::process::id() })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the path from which this program was started: a package may have replaced the file there.
fn own_program() -> io::Result<PathBuf> {
    let path = std::fs::read_link("/proc/self/exe")?;
    let former = path.to_str().and_then(|text| text.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(former.unwrap_or(path))
}

/// Returns what an upgrade would lose, for users.
fn losses(service: &Service) -> Vec<String> {
    let mut losses = Vec::new();
    let all = service.registry.all();
    let names = |entries: &mut dyn Iterator<Item = &Arc<Entry>>| {
        entries.map(|entry| entry.name().to_owned()).collect::<Vec<_>>().join(", ")
    };
    let of_templates = names(&mut all.iter().filter(|entry| entry.template.is_some()));
    if !of_templates.is_empty() {
        losses.push(format!("{of_templates}: the connections to templates would end"));
    }
    let lost = names(&mut all.iter().filter(|entry| entry.template.is_none() && would_be_lost(entry)));
    if !lost.is_empty() {
        losses.push(format!("{lost}: the content would be lost, as it is in memory and not recoverable"));
    }
    let jobs = service.jobs.list(&JobFilter::default());
    let jobs: Vec<_> = jobs.iter().filter(|job| !job.has_ended()).map(|job| job.job.to_string()).collect();
    if !jobs.is_empty() {
        losses.push(format!("the jobs {} would be cancelled", jobs.join(", ")));
    }
    losses
}

/// Returns true if the next program cannot adopt the content of a device.
fn would_be_lost(entry: &Entry) -> bool {
    let is_held = entry.kind.ram().is_some_and(|ram| ram.family().files().is_some());
    entry.spec.is_volatile() && !(is_held && entry.spec.layers.zones.is_none())
}

pub struct Outcome;

/// Parameters of the verb `upgrade.outcome` in a JSON request.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutcomeParams {}

/// Result of the verb `upgrade.outcome`.
#[derive(Debug, Serialize, Deserialize)]
pub struct OutcomeReply {
    /// Number of upgrades of this process.
    pub upgrades: u64,
    /// Result of the last one.
    pub last: Option<UpgradeOutcome>,
}

impl Verb for Outcome {
    const METHOD: &'static str = "upgrade.outcome";
    const READ_ONLY: bool = true;
    type Params = OutcomeParams;
    type Reply = OutcomeReply;

    fn run(service: &Service, _: OutcomeParams) -> Result<OutcomeReply, RpcError> {
        let (upgrades, last) = service.upgrades.last();
        Ok(OutcomeReply { upgrades, last })
    }

    fn show(_: &OutcomeParams, reply: &OutcomeReply, out: &mut dyn Write) -> io::Result<()> {
        let Some(UpgradeOutcome { version, error, paused_ms, connections }) = &reply.last else {
            return Ok(());
        };
        match error {
            Some(why) => writeln!(out, "the upgrade failed: {why}"),
            None => {
                writeln!(out, "freestone {version}: {connections} connections continue, after {paused_ms} ms")
            }
        }
    }
}
