//! `create DEVICE`: creates a device, and publishes it only with `publish=yes`.

use std::env;
use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use crate::changes::recording::Recording;
use crate::exports::Export;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;

pub struct Create;

/// Parameters of the verb `create`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// NAME=KIND[,key=value]... as for serve; publish=yes exports it at the server's addresses
    #[arg(value_parser = crate::verbs::text::keys::words_parser())]
    device: String,
    /// Succeed if the device exists and was created with the same keys
    #[arg(long)]
    #[serde(default)]
    if_absent: bool,
}

impl Params {
    /// Checks the parameters before the server is called, and makes paths absolute, because the server opens the files.
    pub fn checked(self) -> Result<Self, Usage> {
        let if_absent = self.if_absent;
        let entries = Entries::parse_with_warnings(&self.device)?;
        let here =
            env::current_dir().map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
        let entries = entries.with_base(&here);
        let device = entries.to_string();
        Spec::from_entries(entries)?;
        Ok(Self { device, if_absent })
    }
}

/// Result of the verb `create`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    kind: String,
    /// Size of the device in bytes.
    disksize: u64,
    /// False if the device existed already.
    created: bool,
    /// Seed of the injected faults, if the request contained none and a random seed was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Warnings about settings that are valid but may be unintended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    exports: Vec<Export>,
}

impl Verb for Create {
    const METHOD: &'static str = "create";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let spec: Spec = params.device.parse()?;
        let publish = spec.publish.unwrap_or(false);
        let claim = service.claim_new(Self::METHOD, [&spec])?;
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&spec.name])?;
        let (entry, created) = if params.if_absent {
            service.create_if_absent(&claim, spec, publish)?
        } else {
            (service.create(&claim, spec, publish)?, true)
        };
        if created {
            let done = entry.kind.begin_merge(&entry, &service.registry).map_err(RpcError::from);
            done.and_then(|()| recording.commit()).inspect_err(|_| service.undo_create(&claim, &entry))?;
        }
        drop(claim);
        Ok(Reply {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            disksize: entry.size(),
            created,
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
            warnings: entry.record_warning().into_iter().collect(),
            exports: service.exports.of(entry.name()),
        })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, kind, disksize, exports, seed, warnings, created: _ } = reply;
        warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?;
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
