//! `fork BASE NAME`: creates one or several forks of a base, or a template that creates a fork for each connection.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::registry::MAX_DEVICES;
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::layers::NUMBER;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::devices::claims::Claim;
use crate::exports::Export;
use crate::exports::export_spec::{ExportAddress, ExportSpec};
use crate::service::Service;
use crate::settings::allow;
use crate::settings::paths::{address_text, parse_address};
use crate::usage::Usage;
use crate::verbs::Verb;
use crate::verbs::text::keys;

pub struct Fork;

/// Parameters of the verb `fork`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
pub struct Params {
    /// A file with readonly=yes, a qcow2 image, or a snapshot
    base: String,
    /// Name of the fork; with --count, %n stands for the number (without %n, -N is appended)
    name: String,
    #[arg(value_name = "KEY=VALUE")]
    #[arg(value_parser = keys::words_parser())]
    #[arg(
        help = "Keys of the fork: size, mem_limit, mem_min, full (see below), and faults, seed, power_cut, \
                power_cut_unit, record as for serve; with --count, %n in a value stands for the number, with \
                --template for that of the connection"
    )]
    #[serde(skip)]
    words: Vec<String>,
    /// Export it at this address, and listen there if necessary; with --count, %n stands for the number
    #[arg(long, value_name = "ADDR", value_parser = keys::words_parser())]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbd: Option<String>,
    #[arg(long, value_name = "WHO", help = allow::HELP, value_delimiter = ',', requires = "nbd")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    allow: Vec<String>,
    /// Give each connection a fork of its own, removed when the connection ends
    #[arg(long, conflicts_with = "count")]
    #[serde(default)]
    template: bool,
    /// Longest time of a connection to the template
    #[arg(long, value_name = "SECONDS", requires = "template")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl: Option<u64>,
    /// Create N forks, numbered 0 to N-1; all or none
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<usize>,
    /// Succeed if the forks exist and were created with the same settings
    #[arg(long)]
    #[serde(default)]
    if_absent: bool,
    /// All other members of the request are keys of the fork. The fork's specification refuses unknown keys.
    #[arg(skip)]
    #[serde(flatten)]
    keys: Map<String, Value>,
}

/// A fork to create, and the address and allow list of its export.
struct PlannedFork {
    spec: Spec,
    address: Option<Address>,
    allow: Option<AllowList>,
}

impl Params {
    /// Converts the words of the command line to keys, and detects errors that do not depend on the state of the
    /// server before the server is called.
    pub fn checked(mut self) -> Result<Self, Usage> {
        let name = &self.name;
        self.keys = keys::parse_words(name, if self.template { "template" } else { "fork" }, &self.words)?;
        if let Some(key) = ["base", "ttl", "publish"].into_iter().find(|key| self.keys.contains_key(*key)) {
            return Err(Usage(format!("{name}: fork: {key}: cannot be given as a key; see --help")));
        }
        if let Some(nbd) = &self.nbd {
            let absolute = parse_address(nbd, None);
            let absolute = absolute.map_err(|e| Usage(format!("{name}: --nbd: {e}")))?;
            self.nbd = Some(address_text(&absolute));
        }
        self.plan().map_err(|fault| Usage(fault.message))?;
        Ok(self)
    }

    /// Returns the forks to create, or an error if the parameters are invalid.
    fn plan(&self) -> Result<Vec<PlannedFork>, RpcError> {
        let name = &self.name;
        let invalid = |why: String| rpc_error!(invalid, "{name}: fork: {why}");
        if self.template && self.count.is_some() {
            return Err(invalid(
                "a template creates one fork per connection, so count is not allowed".into(),
            ));
        }
        if self.ttl.is_some() && !self.template {
            return Err(invalid("ttl is only for a template".into()));
        }
        if self.nbd.is_none() && !self.allow.is_empty() {
            return Err(invalid("allow: needs nbd".into()));
        }
        let list = (!self.allow.is_empty()).then(|| allow::parse(&self.allow)).transpose();
        let list = list.map_err(|why| invalid(format!("allow: {why}")))?;
        let Some(count) = self.count else { return Ok(vec![self.plan_fork(None, list)?]) };
        if !(1..=MAX_DEVICES).contains(&count) {
            return Err(invalid(format!("count={count}: must be a number from 1 to {MAX_DEVICES}")));
        }
        (0..count).map(|number| self.plan_fork(Some(number), list.clone())).collect()
    }

    /// Returns one fork to create. `%n` is replaced by `number`, or refused if `number` is None.
    fn plan_fork(&self, number: Option<usize>, allow: Option<AllowList>) -> Result<PlannedFork, RpcError> {
        let numbered = |text: &str| match number {
            Some(number) => text.replace(NUMBER, &number.to_string()),
            None => text.to_owned(),
        };
        let name = match number {
            Some(number) if !self.name.contains(NUMBER) => format!("{}-{number}", self.name),
            None if self.name.contains(NUMBER) => {
                refuse!(invalid, "{}: fork: {NUMBER} is only for --count", self.name);
            }
            _ => numbered(&self.name),
        };
        let kind = if self.template { "template" } else { "fork" };
        let mut entries = keys::entries_over(&self.base, &name, kind, self.ttl, &self.keys)?;
        if number.is_some() {
            for (_, value) in &mut entries.pairs {
                *value = numbered(value);
            }
        }
        let spec = Spec::from_entries(entries)?;
        let address = self.nbd.as_deref().map(|nbd| {
            parse_address(&numbered(nbd), None).map_err(|e| rpc_error!(invalid, "{name}: nbd: {e}"))
        });
        let address = address.transpose()?;
        if let (Some(address), Some(list)) = (&address, &allow) {
            allow::check(list, address).map_err(|why| refusal!(invalid, "{name}: fork: allow: {why}"))?;
        }
        Ok(PlannedFork { spec, address, allow })
    }
}

/// Result of the verb `fork`: the created forks, in the order of their numbers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    forks: Vec<CreatedFork>,
}

/// A created fork or template.
#[derive(Debug, Serialize, Deserialize)]
struct CreatedFork {
    name: String,
    kind: String,
    base: String,
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

impl Verb for Fork {
    const METHOD: &'static str = "fork";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        freestone_core::trail::step!();
        let plan = params.plan()?;
        let claim = service.claim_new(Self::METHOD, plan.iter().map(|fork| &fork.spec))?;
        let names: Vec<_> = plan.iter().map(|fork| fork.spec.name.as_str()).collect();
        let recording = Recording::begin(service, &claim, Self::METHOD, &names)?;
        let mut made = Vec::with_capacity(plan.len());
        let mut forks = plan.into_iter();
        let done = forks.try_for_each(|PlannedFork { spec, address, allow }| {
            let at = address.as_ref().map(|address| (address, allow.as_ref()));
            made.push(create_and_publish(service, &claim, spec, at, params.if_absent)?);
            Ok(())
        });
        done.and_then(|()| recording.commit()).inspect_err(|_| {
            // If one fork fails, remove the others: either all are created or none.
            for (entry, _) in made.iter().rev().filter(|(_, created)| *created) {
                service.undo_create(&claim, entry);
            }
        })?;
        let created_fork = |(entry, created): &(std::sync::Arc<Entry>, bool)| CreatedFork {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            base: params.base.clone(),
            disksize: entry.size(),
            created: *created,
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
            warnings: entry.record_warning().into_iter().collect(),
            exports: service.exports.of(entry.name()),
        };
        Ok(Reply { forks: made.iter().map(created_fork).collect() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        for CreatedFork { name, kind, base, disksize, created, seed, warnings, exports } in &reply.forks {
            warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?;
            if let Some(seed) = seed {
                writeln!(out, "{name}: faults with seed={seed}")?;
            }
            let existing = if *created { "" } else { " (existed already)" };
            let what = format!("{name}: {kind} of {base}, {}{existing}", human(*disksize));
            match exports.as_slice() {
                [] => {
                    writeln!(out, "{what}, not published; `freestone publish {name} --nbd ADDR` does that")?;
                }
                exports => exports.iter().try_for_each(|e| writeln!(out, "{what}, {}", e.place()))?,
            }
        }
        Ok(())
    }
}

/// Creates and publishes one fork. On failure, no fork is left. Returns the entry of the fork, and true if
/// the fork did not exist before.
fn create_and_publish(
    service: &Service,
    claim: &Claim<'_>,
    spec: Spec,
    at: Option<(&Address, Option<&AllowList>)>,
    if_absent: bool,
) -> Result<(std::sync::Arc<Entry>, bool), RpcError> {
    let (entry, created) = if if_absent {
        service.create_if_absent(claim, spec, false)?
    } else {
        (service.create(claim, spec, false)?, true)
    };
    if let Some((address, allow)) = at {
        let is_published = !created && service.exports.is_at(entry.name(), address);
        let published = if is_published {
            service.exports.check_same(entry.name(), address, allow)
        } else {
            let export = ExportSpec::at(ExportAddress::Nbd(address.clone()));
            let export = ExportSpec { allow: allow.cloned(), ..export };
            service.exports.publish_at(claim, &entry, &export).map(drop)
        };
        if let Err(fault) = published {
            if created {
                service.undo_create(claim, &entry);
            }
            return Err(fault);
        }
    }
    Ok((entry, created))
}
