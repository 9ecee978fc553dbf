//! `rewind NAME`: a fork back to its base, at once.

use std::io::{self, Write};
use std::sync::atomic::Ordering;

use clap::Args;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use super::{Verb, check_unrecorded, errno_of};
use crate::control::protocol::Fault;
use crate::service::Service;

/// The verb.
pub struct Rewind;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The fork; what was written to it is gone
    name: String,
    /// Also where clients are connected; they stay, and read the base from then on
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
}

impl Verb for Rewind {
    const METHOD: &'static str = "rewind";
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let name = params.name;
        let _claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        if entry.kind.fork().is_none() {
            // Of what is in memory, a RAM disk is what began its family.
            let why = match entry.kind.ram().and(entry.kind.own_family()) {
                Some(_) => format!("a ram device has no base; `freestone reset {name}` wipes it"),
                None => format!("a {} device is not rewound; only forks are", entry.kind.name()),
            };
            return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: {why}")));
        }
        service.registry.check_unused(&entry, "rewound")?;
        check_unrecorded(&entry, "rewound")?;
        service.check_wipe(&entry, params.force)?;
        let _job = service.jobs.begin(&name, "rewind")?;
        entry.rewinds.fetch_add(1, Ordering::SeqCst);
        // Writes that were held back are waited for, and may wait for room.
        let _now = entry.layers.power.as_ref().and_then(|_| entry.no_waiting());
        let done = entry.layers.wipe(&|| entry.kind.wipe(false));
        done.map_err(|e| Fault::failed(errno_of(e), format!("{name}: {e}")))?;
        Ok(Reply { name })
    }

    fn show(_: &Params, _: &Reply, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
