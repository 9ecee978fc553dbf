//! `fork BASE NAME`: disks over a base; one, many, or one for every connection.

use std::io::{self, Write};

use clap::Args;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::Spec;
use freestone_spec::kinds::registry::MAX_DEVICES;
use freestone_spec::layers::NUMBER;
use freestone_spec::limits::LimitSpec;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Verb, keys};
use crate::allow;
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::exports::Export;
use crate::paths::{address_text, parse_address};
use crate::recording::Recording;
use crate::service::Service;

/// The verb.
pub struct Fork;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// A file with readonly=yes, a qcow2 image, or a snapshot
    base: String,
    /// The fork; with --count, %n in it is the number (else -N is appended)
    name: String,
    /// Of the fork.
    #[arg(value_name = "KEY=VALUE")]
    #[arg(value_parser = keys::words_parser())]
    #[arg(help = "size=SIZE (default the base's; beyond it are zeroes), mem_limit=SIZE (its own cap), \
                  mem_min=SIZE (guaranteed of the family's mem_limit), full=error|wait (where there is no room), and faults, seed, power_cut, power_cut_unit, record as for \
                  serve; with --count, %n in a value is the number, with --template that of a connection")]
    words: Vec<String>,
    /// Publish it there; the server starts to listen there if it does not yet; with --count, %n is
    /// the number
    #[arg(long, value_name = "ADDR", value_parser = keys::words_parser())]
    nbd: Option<String>,
    /// Who may connect there.
    #[arg(long, value_name = "WHO", help = allow::HELP, value_delimiter = ',', requires = "nbd")]
    allow: Vec<String>,
    /// A fork for every connection, gone when that ends
    #[arg(long, conflicts_with = "count")]
    template: bool,
    /// End a connection to the template after so long
    #[arg(long, value_name = "SECONDS", requires = "template")]
    ttl: Option<u64>,
    /// So many forks, 0 to N-1, all or none
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// What is there, made with the same settings, is success as well
    #[arg(long)]
    if_absent: bool,
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
pub struct Params {
    base: String,
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbd: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    allow: Vec<String>,
    #[serde(default)]
    template: bool,
    /// Seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<usize>,
    #[serde(default)]
    if_absent: bool,
    /// All else is keys of the device, which refuse what is unknown.
    #[serde(flatten)]
    keys: Map<String, Value>,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { base, name, words, nbd, allow, template, ttl, count, if_absent } = line;
        let keys = keys::of_words(&name, if template { "template" } else { "fork" }, &words)?;
        if let Some(key) = ["base", "ttl", "publish"].into_iter().find(|key| keys.contains_key(*key)) {
            return Err(Usage(format!("{name}: fork: {key}: not as a key here; see --help")));
        }
        let mut params = Self { base, name, nbd, allow, template, ttl, count, if_absent, keys };
        if let Some(nbd) = &params.nbd {
            let absolute = parse_address(nbd, None);
            let absolute = absolute.map_err(|e| Usage(format!("{}: --nbd: {e}", params.name)))?;
            params.nbd = Some(address_text(&absolute));
        }
        // Everything that the words alone can tell.
        params.plan().map_err(|fault| Usage(fault.message))?;
        Ok(params)
    }
}

/// A fork and where it is published.
struct One {
    spec: Spec,
    address: Option<Address>,
    allow: Option<AllowList>,
}

impl Params {
    fn plan(&self) -> Result<Vec<One>, Fault> {
        let name = &self.name;
        let invalid = |why: String| Fault::invalid(format!("{name}: fork: {why}"));
        if self.template && self.count.is_some() {
            return Err(invalid(
                "a template makes as many forks as there are connections, without count".into(),
            ));
        }
        if self.ttl.is_some() && !self.template {
            return Err(invalid("ttl is for a template".into()));
        }
        if self.nbd.is_none() && !self.allow.is_empty() {
            return Err(invalid("allow: of which address? nbd is missing".into()));
        }
        let list = (!self.allow.is_empty()).then(|| allow::parse(&self.allow)).transpose();
        let list = list.map_err(|why| invalid(format!("allow: {why}")))?;
        let Some(count) = self.count else { return Ok(vec![self.one(None, list)?]) };
        if !(1..=MAX_DEVICES).contains(&count) {
            return Err(invalid(format!("count={count}: must be a number from 1 to {MAX_DEVICES}")));
        }
        (0..count).map(|number| self.one(Some(number), list.clone())).collect()
    }

    fn one(&self, number: Option<usize>, allow: Option<AllowList>) -> Result<One, Fault> {
        let at = |text: &str| match number {
            Some(number) => text.replace(NUMBER, &number.to_string()),
            None => text.to_owned(),
        };
        let name = match number {
            Some(number) if !self.name.contains(NUMBER) => format!("{}-{number}", self.name),
            None if self.name.contains(NUMBER) => {
                return Err(Fault::invalid(format!("{}: fork: {NUMBER} is for --count", self.name)));
            }
            _ => at(&self.name),
        };
        let kind = if self.template { "template" } else { "fork" };
        let mut entries = keys::over(&self.base, &name, kind, self.ttl, &self.keys)?;
        if number.is_some() {
            for (_, value) in &mut entries.pairs {
                *value = at(value);
            }
        }
        let spec = Spec::from_entries(entries).map_err(|e| Fault::invalid(e.to_string()))?;
        let address = self.nbd.as_deref().map(|nbd| {
            parse_address(&at(nbd), None).map_err(|e| Fault::invalid(format!("{name}: nbd: {e}")))
        });
        let address = address.transpose()?;
        if let (Some(address), Some(list)) = (&address, &allow) {
            allow::check(list, address)
                .map_err(|why| Fault::invalid(format!("{name}: fork: allow: {why}")))?;
        }
        Ok(One { spec, address, allow })
    }
}

/// What was made, in order.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    forks: Vec<Made>,
}

/// A fork or template.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    name: String,
    kind: String,
    base: String,
    /// Bytes.
    disksize: u64,
    /// False where it was there.
    created: bool,
    /// What faults are decided by, where nobody chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    exports: Vec<Export>,
}

impl Verb for Fork {
    const METHOD: &'static str = "fork";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let plan = params.plan()?;
        let claim = service.claim_new(Self::METHOD, plan.iter().map(|one| &one.spec))?;
        let names: Vec<_> = plan.iter().map(|one| one.spec.name.as_str()).collect();
        let recording = Recording::begin(service, &claim, Self::METHOD, &names)?;
        let mut made = Vec::with_capacity(plan.len());
        let mut each = plan.into_iter();
        let done = each.try_for_each(|One { spec, address, allow }| {
            let at = address.as_ref().map(|address| (address, allow.as_ref()));
            made.push(make(service, &claim, spec, at, params.if_absent)?);
            Ok(())
        });
        done.and_then(|()| recording.commit()).inspect_err(|_| {
            // All or nothing.
            for (entry, _) in made.iter().rev().filter(|(_, created)| *created) {
                service.undo(&claim, entry);
            }
        })?;
        let told = |(entry, created): &(std::sync::Arc<Entry>, bool)| Made {
            name: entry.name().to_owned(),
            kind: entry.kind.name().to_owned(),
            base: params.base.clone(),
            disksize: entry.size(),
            created: *created,
            seed: entry.layers.seed_is_random.then_some(entry.layers.seed),
            exports: service.exports.of(entry.name()),
        };
        Ok(Reply { forks: made.iter().map(told).collect() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        for Made { name, kind, base, disksize, created, seed, exports } in &reply.forks {
            if let Some(seed) = seed {
                writeln!(out, "{name}: faults with seed={seed}")?;
            }
            let there = if *created { "" } else { " (was there)" };
            let what = format!("{name}: {kind} of {base}, {}{there}", human(*disksize));
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

/// One fork, or nothing.
fn make(
    service: &Service,
    claim: &Claim<'_>,
    spec: Spec,
    at: Option<(&Address, Option<&AllowList>)>,
    if_absent: bool,
) -> Result<(std::sync::Arc<Entry>, bool), Fault> {
    let (entry, created) = if if_absent {
        service.create_if_absent(claim, spec, false)?
    } else {
        (service.create(claim, spec, false)?, true)
    };
    if let Some((address, allow)) = at {
        let there = !created && service.exports.is_at(entry.name(), address);
        let published = if there {
            service.exports.check_same(entry.name(), address, allow)
        } else {
            let limits = LimitSpec::default();
            service.exports.publish(claim, &entry, address, false, allow, limits).map(drop)
        };
        if let Err(fault) = published {
            if created {
                service.undo(claim, &entry);
            }
            return Err(fault);
        }
    }
    Ok((entry, created))
}
