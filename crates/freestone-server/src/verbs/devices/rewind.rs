//! `rewind NAME...` resets forks to the content of their base. `rewind NAME --to SNAPSHOT` resets a RAM disk
//! or fork to one of its snapshots.

use std::io::{self, Write};
use std::sync::Arc;

use clap::Args;
use freestone::ram::Ram;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{ForkSpec, KindSpec, RestartPolicy, Spec, build};
use freestone_spec::refusal::{Errno, Refusal};
use serde::{Deserialize, Serialize};

use crate::exports::{FORCE, check_not_connection_fork};
use crate::jobs::JobKind;
use crate::service::Service;
use crate::verbs::{Verb, errno_of};

pub struct Rewind;

/// Command line of the verb `rewind`.
#[derive(Debug, Args)]
pub struct Line {
    /// Forks, by name or pattern (* matches any characters, ? one); their changes are lost. Devices that
    /// `freestone mount` mounted are unmounted before and mounted again after
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Rewind even if clients that may cache content are connected; they stay and read the base from then on.
    /// Unmount a file system that `freestone mount` did not mount before: its cached blocks would corrupt the new
    /// content
    #[arg(long)]
    force: bool,
    /// Rewind to this snapshot of the ram device or fork, which becomes a fork of it; with --force,
    /// clients are disconnected
    #[arg(long, value_name = "SNAPSHOT")]
    to: Option<String>,
}

impl Line {
    /// Returns the parameters of the request for the device `name`.
    pub fn of(&self, name: &str) -> Params {
        Params { name: name.to_owned(), force: self.force, to: self.to.clone() }
    }
}

/// Parameters of the verb `rewind` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    #[serde(default)]
    force: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    to: Option<String>,
}

/// Result of the verb `rewind`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// With `to`: number of client connections that were closed. None for a rewind to the base, which closes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    connections_ended: Option<usize>,
}

impl Verb for Rewind {
    const METHOD: &'static str = "rewind";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let name = params.name;
        if let Some(to) = &params.to {
            return to_snapshot(service, name, to, params.force);
        }
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if entry.kind.fork().is_none() {
            // A device in memory that is not a fork and has a family of its own is a RAM disk.
            let why = match entry.kind.ram().and(entry.kind.own_family()) {
                Some(_) => format!(
                    "a ram device has no base; `freestone reset {name}` wipes it, --to goes to a snapshot of it"
                ),
                None => {
                    format!("{} device cannot be rewound; only forks can", with_article(entry.kind.name()))
                }
            };
            refuse!(EOPNOTSUPP, "{name}: {why}");
        }
        service.registry.check_unused(&entry, "rewound")?;
        if service.exports.skip_wipe(&entry, false) {
            return Ok(Reply { name, connections_ended: None });
        }
        let blocks = service.exports.check_wipe(&entry, params.force)?;
        let _job = service.jobs.begin(&name, Self::METHOD, JobKind::EXCLUSIVE_UNCANCELLABLE)?;
        // The wipe waits for unflushed writes, so these writes must not wait for memory or limits.
        let _now = entry.layers.power.as_ref().map(|_| service.exports.bypass_waiting(&entry));
        let done = entry.wipe(false);
        done.map_err(|e| RpcError::failed(errno_of(e), format!("{name}: {e}")))?;
        blocks.drop_caches();
        Ok(Reply { name, connections_ended: None })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the device with a fork of its snapshot `to`, under the same name. No data is copied, and the
/// snapshot stays.
fn to_snapshot(service: &Service, name: String, to: &str, force: bool) -> Result<Reply, RpcError> {
    let _claim = service.claim_over(Rewind::METHOD, &name, to)?;
    let (entry, snapshot) = (service.find(&name)?, service.find(to)?);
    let refuse = |errno, why: &str| Err(RpcError::failed(errno, format!("{name}: to={to}: {why}")));
    let ram = match entry.kind.ram() {
        Some(ram) if entry.kind.memory_snapshot().is_none() => ram,
        _ => return refuse(Errno::EOPNOTSUPP, "only a ram device or fork goes back to a snapshot of it"),
    };
    let is_own = |of: &Arc<Ram>| {
        snapshot.spec.kind.parent_name() == Some(name.as_str()) && of.family().is_same(&ram.family())
    };
    if !snapshot.kind.memory_snapshot().is_some_and(is_own) {
        return refuse(Errno::EINVAL, "is not a snapshot of it");
    }
    check_not_connection_fork(&entry)?;
    service.registry.check_unused(&entry, "rewound")?;
    if !force {
        service.exports.check_idle(&entry)?;
    }
    let blocks = service.exports.claim_blocks(&entry, force, FORCE)?;
    let _job = service.jobs.begin(&name, Rewind::METHOD, JobKind::EXCLUSIVE_UNCANCELLABLE)?;
    // The guaranteed memory moves to the fork that replaces the device.
    let (mem_limit, mem_min) = ram.own_limits();
    let set_guarantee = |guarantee| {
        let set = if mem_min > 0 { ram.set_own_limits(mem_limit, guarantee) } else { Ok(()) };
        set.map_err(|error| rpc_error!(EINVAL, "{name}: {error}"))
    };
    set_guarantee(0)?;
    let fork = ForkSpec { base: to.to_owned(), size: None, mem_limit, mem_min, full: ram.wait_override() };
    let RestartPolicy { keep, on_data_loss } = entry.restart_policy();
    let spec = Spec {
        name: name.clone(),
        // A restart of the server creates the old device again, not the fork: the snapshot depends on the old device.
        words: entry.words.current(&entry.spec),
        publish: entry.spec.publish,
        tls_clients: entry.spec.tls_clients.clone(),
        on_data_loss,
        keep,
        kind: KindSpec::Fork(fork),
        layers: entry.layers.current_spec(&entry.spec.layers),
        limits: entry.limits(),
    };
    let made = build(spec, &service.registry);
    let mut new = made.inspect_err(|_| {
        // Restores the guaranteed memory, which other devices could get only during this call.
        let _ = set_guarantee(mem_min);
    })?;
    new.identity = entry.identity;
    new.clients = Arc::clone(&entry.clients);
    let new = Arc::new(new);
    if let Some(faults) = &entry.layers.faults {
        faults.release();
    }
    // Requests that wait for space would delay the restart of the exports. Requests that wait for a rate
    // limit belong to the old content. Therefore both fail.
    let _now = service.exports.fail_waiting(&entry);
    let (ended, replaced) = service.exports.restart(&name, || {
        new.record_key_after(&entry, &service.registry);
        service.registry.replace(&entry, &new).map_err(|why| why.of(&name))?;
        // Again, because the key may have been recorded only now: see `Service::record_keys`.
        new.record_key_after(&entry, &service.registry);
        service.exports.replace(&new);
        Ok::<(), Refusal>(())
    });
    if let Err(refusal) = replaced {
        drop(new);
        let _ = set_guarantee(mem_min);
        return Err(refusal.into());
    }
    blocks.drop_caches();
    Ok(Reply { name, connections_ended: Some(ended) })
}
