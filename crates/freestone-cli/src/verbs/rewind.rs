//! `rewind NAME...`: a fork back to its base, at once; `rewind NAME --to SNAPSHOT`: a RAM disk or fork
//! back to a snapshot of it.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use clap::Args;
use freestone::ram::Ram;
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::{ForkSpec, KindSpec, Spec, build};
use freestone_spec::refusal::{Errno, Refusal};
use serde::{Deserialize, Serialize};

use super::{Verb, errno_of};
use crate::control::protocol::Fault;
use crate::exports::check_own;
use crate::job::Kind;
use crate::service::Service;

/// The verb.
pub struct Rewind;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Forks, by name or pattern (* stands for any characters, ? for one); what was written to them
    /// is gone
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Also where clients are connected; they stay, and read the base from then on
    #[arg(long)]
    force: bool,
    /// Back to this snapshot of the ram device or fork, on which it stands from then on; with --force
    /// clients are cut off
    #[arg(long, value_name = "SNAPSHOT")]
    to: Option<String>,
}

impl Line {
    /// What is asked for one of the devices.
    pub fn of(&self, name: &str) -> Params {
        Params { name: name.to_owned(), force: self.force, to: self.to.clone() }
    }
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    #[serde(default)]
    force: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    to: Option<String>,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// With `to`: how many connections that ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    connections_ended: Option<usize>,
}

impl Verb for Rewind {
    const METHOD: &'static str = "rewind";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        if let Some(to) = &params.to {
            return to_snapshot(service, name, to, params.force);
        }
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if entry.kind.fork().is_none() {
            // Of what is in memory, a RAM disk is what began its family.
            let why = match entry.kind.ram().and(entry.kind.own_family()) {
                Some(_) => format!(
                    "a ram device has no base; `freestone reset {name}` wipes it, --to goes to a snapshot of it"
                ),
                None => format!("{} device is not rewound; only forks are", a_kind(entry.kind.name())),
            };
            return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: {why}")));
        }
        service.registry.check_unused(&entry, "rewound")?;
        service.exports.check_wipe(&entry, params.force)?;
        let _job = service.jobs.begin(&name, Self::METHOD, Kind::WHOLE)?;
        entry.rewinds.fetch_add(1, Ordering::SeqCst);
        // Writes that were held back are waited for, and may wait for room.
        let _now = entry.layers.power.as_ref().map(|_| service.exports.no_waiting(&entry));
        let done = entry.wipe(false);
        done.map_err(|e| Fault::failed(errno_of(e), format!("{name}: {e}")))?;
        Ok(Reply { name, connections_ended: None })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// What the snapshot holds is shown by a fork of it in the place of the device: at once, and the
/// snapshot stays.
fn to_snapshot(service: &Service, name: String, to: &str, force: bool) -> Result<Reply, Fault> {
    let _claim = service.claim_over(Rewind::METHOD, &name, to)?;
    let (entry, snapshot) = (service.find(&name)?, service.find(to)?);
    let refuse = |errno, why: &str| Err(Fault::failed(errno, format!("{name}: to={to}: {why}")));
    let ram = match entry.kind.ram() {
        Some(ram) if entry.kind.memory_snapshot().is_none() => ram,
        _ => return refuse(Errno::EOPNOTSUPP, "only a ram device or fork goes back to a snapshot of it"),
    };
    let is_own =
        |of: &Arc<Ram>| snapshot.spec.kind.below() == Some(name.as_str()) && of.family().is(&ram.family());
    if !snapshot.kind.memory_snapshot().is_some_and(is_own) {
        return refuse(Errno::EINVAL, "is no snapshot of it");
    }
    check_own(&entry)?;
    service.registry.check_unused(&entry, "rewound")?;
    if !force {
        service.exports.check_idle(&entry)?;
    }
    let _job = service.jobs.begin(&name, Rewind::METHOD, Kind::WHOLE)?;
    // What it is guaranteed goes over to its successor.
    let (mem_limit, mem_min) = ram.own_limits();
    let give = |least| {
        let set = if mem_min > 0 { ram.set_own_limits(mem_limit, least) } else { Ok(()) };
        set.map_err(|error| Fault::failed(Errno::EINVAL, format!("{name}: {error}")))
    };
    give(0)?;
    let fork = ForkSpec { base: to.to_owned(), size: None, mem_limit, mem_min, full: ram.own_wait() };
    let spec = Spec {
        name: name.clone(),
        // Made again it would be what it was: the snapshot stands on it.
        words: entry.words.now(&entry.spec),
        publish: entry.spec.publish,
        tls_clients: entry.spec.tls_clients.clone(),
        on_lost: entry.spec.on_lost,
        keep: entry.spec.keep,
        kind: KindSpec::Fork(fork),
        layers: entry.layers.as_now(&entry.spec.layers),
        limits: entry.limits(),
    };
    let made = build(spec, &service.registry);
    let mut new = made.inspect_err(|_| {
        // It was its own until now, and nobody else was told that it is to be had.
        let _ = give(mem_min);
    })?;
    new.identity = entry.identity;
    new.clients = Arc::clone(&entry.clients);
    let new = Arc::new(new);
    if let Some(faults) = &entry.layers.faults {
        faults.release();
    }
    // What waits for room would be waited for, and what waits for its turn was asked of what goes.
    let _now = service.exports.end_waiting(&entry);
    let (ended, replaced) = service.exports.restart(&name, || {
        service.registry.replace(&entry, &new).map_err(|why| why.of(&name))?;
        service.exports.replace(&new);
        Ok::<(), Refusal>(())
    });
    replaced?;
    Ok(Reply { name, connections_ended: Some(ended) })
}
