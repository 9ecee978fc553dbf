//! `create DEVICE`: a device at run time. It is published only where that is asked.

use std::env;
use std::io::{self, Write};

use clap::Args;
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::exports::Export;
use crate::recording::Recording;
use crate::service::Service;

/// The verb.
pub struct Create;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// NAME=KIND[,key=value]... as for serve; publish=yes publishes it on serve's addresses
    #[arg(value_parser = super::keys::words_parser())]
    device: String,
    /// If it is there, made with the same words, that is success as well
    #[arg(long)]
    #[serde(default)]
    if_absent: bool,
}

impl Params {
    /// Checks the device before the server is asked, and makes its paths independent of our
    /// directory.
    pub fn checked(self) -> Result<Self, Usage> {
        let if_absent = self.if_absent;
        let entries = Entries::parse(&self.device).map_err(|e| Usage(e.to_string()))?;
        let here =
            env::current_dir().map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
        let entries = entries.with_base(&here);
        let device = entries.to_string();
        Spec::from_entries(entries).map_err(|e| Usage(e.to_string()))?;
        Ok(Self { device, if_absent })
    }
}

/// What was made.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    kind: String,
    /// Bytes.
    disksize: u64,
    /// False where it was there.
    created: bool,
    /// What faults are decided by, where nobody chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    exports: Vec<Export>,
}

impl Verb for Create {
    const METHOD: &'static str = "create";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let spec: Spec = params.device.parse().map_err(|e| Fault::invalid(format!("{e}")))?;
        let publish = spec.publish.unwrap_or(false);
        let claim = service.claim_new(Self::METHOD, [&spec])?;
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&spec.name])?;
        let (entry, created) = if params.if_absent {
            service.create_if_absent(&claim, spec, publish)?
        } else {
            (service.create(&claim, spec, publish)?, true)
        };
        if created {
            let done = entry.kind.begin_merge(&entry, &service.registry).map_err(Fault::from);
            done.and_then(|()| recording.commit()).inspect_err(|_| service.undo(&claim, &entry))?;
        }
        drop(claim);
        Ok(Reply {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            disksize: entry.size(),
            created,
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
            exports: service.exports.of(entry.name()),
        })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, kind, disksize, exports, seed, created: _ } = reply;
        if let Some(seed) = seed {
            writeln!(out, "{name}: faults with seed={seed}")?;
        }
        if exports.is_empty() {
            let publish = format!("freestone publish {name} --nbd ADDR");
            return writeln!(
                out,
                "{name}: {kind} {}, not published; `{publish}` does that",
                human(*disksize)
            );
        }
        exports.iter().try_for_each(|e| writeln!(out, "{name}: {kind} {}, {}", human(*disksize), e.place()))
    }
}
