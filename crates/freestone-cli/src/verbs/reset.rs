//! `reset NAME...`: wipes a ram or null device; a fork is as its base after that.

use std::io::{self, Write};
use std::sync::atomic::Ordering;

use clap::Args;
use freestone_spec::entries::a_kind;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::{Verb, errno_of};
use crate::control::protocol::Fault;
use crate::job::Kind;
use crate::service::Service;

/// The verb.
pub struct Reset;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Ram and null devices and forks, by name or pattern (* stands for any characters, ? for one)
    #[arg(required = true, value_name = "NAME|PATTERN")]
    pub names: Vec<String>,
    /// Also where clients are connected; they stay, and read zeroes (of a fork its base) from then
    /// on
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

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
}

impl Verb for Reset {
    const METHOD: &'static str = "reset";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if entry.kind.memory_snapshot().is_some() || entry.kind.cow().is_some() {
            let why = "is a snapshot, which does not change; fork it";
            return Err(Fault::failed(Errno::EROFS, format!("{name}: {why}")));
        }
        if !entry.kind.can_wipe() {
            let why = "is not reset; only ram and null devices and forks are";
            let kind = a_kind(entry.kind.name());
            return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: {kind} device {why}")));
        }
        service.registry.check_unused(&entry, "reset")?;
        service.exports.check_wipe(&entry, params.force)?;
        let _job = service.jobs.begin(&name, Self::METHOD, Kind::WHOLE)?;
        entry.rewinds.fetch_add(1, Ordering::SeqCst);
        // Writes that were held back are waited for, and may wait for room.
        let _now = entry.layers.power.as_ref().map(|_| service.exports.no_waiting(&entry));
        let wiped = entry.wipe(true);
        wiped.map_err(|e| Fault::failed(errno_of(e), format!("{name}: {e}")))?;
        Ok(Reply { name })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
