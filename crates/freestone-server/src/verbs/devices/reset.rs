//! `reset NAME...`: wipes ram and null devices, and resets forks to their base.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::verbs::devices::Target;
use crate::verbs::{Verb, errno_of};

pub struct Reset;

/// Command line of the verb `reset`.
#[derive(Debug, Args)]
pub struct Line {
    /// Ram and null devices and forks, by name or pattern (* matches any characters, ? one). Devices that
    /// `freestone mount` mounted are unmounted before and mounted again after
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Reset even if clients that may cache content are connected; they stay connected and read zeroes (of a fork, its
    /// base) from then on
    #[arg(long)]
    force: bool,
}

impl Line {
    /// Returns the parameters of the request for the device `name`.
    pub fn of(&self, name: &str) -> Target {
        Target { name: name.to_owned(), force: self.force }
    }
}

/// Result of the verb `reset`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
}

impl Verb for Reset {
    const METHOD: &'static str = "reset";
    const READ_ONLY: bool = false;
    type Params = Target;
    type Reply = Reply;

    fn run(service: &Service, params: Target) -> Result<Reply, RpcError> {
        let name = params.name;
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if entry.kind.memory_snapshot().is_some() || entry.kind.cow().is_some() {
            refuse!(EROFS, "{name}: is a snapshot, which does not change; fork it");
        }
        if !entry.kind.can_wipe() {
            let why = "cannot be reset; only ram and null devices and forks can";
            let kind = with_article(entry.kind.name());
            refuse!(EOPNOTSUPP, "{name}: {kind} device {why}");
        }
        service.registry.check_unused(&entry, "reset")?;
        if service.exports.skip_wipe(&entry, true) {
            return Ok(Reply { name });
        }
        let blocks = service.exports.check_wipe(&entry, params.force)?;
        let _job = service.jobs.begin(&name, Self::METHOD, JobKind::EXCLUSIVE_UNCANCELLABLE)?;
        // The wipe waits for unflushed writes, so these writes must not wait for memory or limits.
        let _now = entry.layers.power.as_ref().map(|_| service.exports.bypass_waiting(&entry));
        let wiped = entry.wipe(true);
        wiped.map_err(|e| RpcError::failed(errno_of(e), format!("{name}: {e}")))?;
        blocks.drop_caches();
        Ok(Reply { name })
    }

    fn show(_: &Target, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
