//! `snapshot ORIGIN[,ORIGIN...] NAME[,NAME...]`: takes snapshots of devices, all at one moment.

use std::env;
use std::io::{self, Write};

use clap::Args;
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Verb, words};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::recording::Recording;
use crate::service::Service;

/// Keys of the command line. All but [`PER_SNAPSHOT_KEYS`] apply to every snapshot.
const KEYS: [&str; 10] = [
    "cow",
    "cow_size",
    "store",
    "chunk_size",
    "readonly",
    "discard_zeroes_cow",
    "discard_passdown_origin",
    "force",
    "merge",
    "tls_clients",
];
/// Keys with a list of values, one per snapshot.
const PER_SNAPSHOT_KEYS: [&str; 2] = ["cow", "cow_size"];

pub struct Snapshot;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Writable ram and null devices, forks and files
    #[arg(value_name = "ORIGIN[,ORIGIN...]")]
    origins: String,
    /// One name for each origin
    #[arg(value_name = "NAME[,NAME...]")]
    names: String,
    #[arg(value_name = "KEY=VALUE", value_parser = super::keys::words_parser())]
    #[arg(help = "Keys of the snapshot, see below; several origins have cow=A,B; tls_clients as for serve")]
    words: Vec<String>,
}

/// Parameters of the request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// `[{"origin": "db", "name": "db-1", "cow": "/x.cow", ...}]`
    snapshots: Vec<Map<String, Value>>,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { origins, names: list, words } = line;
        let [origins, names] = [&origins, &list].map(|text| text.split(',').collect::<Vec<_>>());
        if origins.len() != names.len() {
            let (of, to) = (origins.len(), names.len());
            return Err(Usage(format!(
                "{list}: snapshot: {of} origins and {to} names; one for each is needed"
            )));
        }
        let mut values = words::parse(&list, "snapshot", &words, &KEYS)?;
        let mut lists = Vec::new();
        for key in PER_SNAPSHOT_KEYS {
            let Some(text) = values.remove(key) else { continue };
            let parts: Vec<String> = text.split(',').map(str::to_owned).collect();
            if parts.len() != names.len() {
                let (found, wanted) = (parts.len(), names.len());
                let why = format!(
                    "{found} values for {wanted} snapshots; leave the place of one empty that has none"
                );
                return Err(Usage(format!("{list}: snapshot: {key}={text}: {why}")));
            }
            lists.push((key, parts));
        }
        let here =
            env::current_dir().map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
        let mut snapshots = Vec::new();
        for (index, (origin, name)) in origins.iter().zip(&names).enumerate() {
            let mut entries = Entries::new(name, "snapshot").map_err(|e| Usage(e.to_string()))?;
            let own = lists.iter().map(|(key, parts)| (*key, parts[index].as_str()));
            let common = values.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            for (key, value) in own.filter(|(_, value)| !value.is_empty()).chain(common) {
                entries.add(key, value).map_err(|e| Usage(e.to_string()))?;
            }
            let entries = entries.with_base(&here);
            let mut snapshot = Map::from_iter([
                ("origin".to_owned(), (*origin).into()),
                ("name".to_owned(), (*name).into()),
            ]);
            for (key, value) in entries.pairs {
                snapshot.insert(key, value.into());
            }
            snapshots.push(snapshot);
        }
        let params = Self { snapshots };
        params.specs().map_err(|fault| Usage(fault.message))?;
        Ok(params)
    }
}

impl Params {
    fn specs(&self) -> Result<Vec<Spec>, Fault> {
        if self.snapshots.is_empty() {
            return Err(Fault::invalid("snapshots: must have one at least"));
        }
        self.snapshots.iter().map(parse_spec).collect()
    }
}

/// Parses a snapshot of the request, with the keys of the device kind `snapshot`.
fn parse_spec(snapshot: &Map<String, Value>) -> Result<Spec, Fault> {
    let Some(Value::String(name)) = snapshot.get("name") else {
        return Err(Fault::invalid("snapshots: each needs a name, a text"));
    };
    let invalid = |e: &dyn std::fmt::Display| Fault::invalid(e.to_string());
    let mut entries = Entries::new(name, "snapshot").map_err(|e| invalid(&e))?;
    for (key, value) in snapshot.iter().filter(|(key, _)| *key != "name") {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            _ => return Err(Fault::invalid(format!("{name}: {key}: must be a text or a boolean"))),
        };
        entries.add(key, &text).map_err(|e| invalid(&e))?;
    }
    Spec::from_entries(entries).map_err(|e| invalid(&e))
}

/// Result: the snapshots, in the order of the request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    snapshots: Vec<CreatedSnapshot>,
}

/// A new snapshot.
#[derive(Debug, Serialize, Deserialize)]
struct CreatedSnapshot {
    name: String,
    origin: String,
    /// In bytes.
    disksize: u64,
}

impl Verb for Snapshot {
    const METHOD: &'static str = "snapshot";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let specs = params.specs()?;
        let claim = service.claim_new(Self::METHOD, &specs)?;
        let names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let recording = Recording::begin(service, &claim, Self::METHOD, &names)?;
        let made = service.snapshot(&claim, specs)?;
        let mut entries = made.iter();
        let begun = entries.try_for_each(|entry| entry.kind.begin_merge(entry, &service.registry));
        begun.map_err(Fault::from).and_then(|()| recording.commit()).inspect_err(|_| {
            for entry in &made {
                service.undo(&claim, entry);
            }
        })?;
        let snapshots = made.iter().map(|entry| CreatedSnapshot {
            name: entry.name().to_owned(),
            origin: entry.spec.kind.below().unwrap_or_default().to_owned(),
            disksize: entry.size(),
        });
        Ok(Reply { snapshots: snapshots.collect() })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.snapshots.iter().try_for_each(|CreatedSnapshot { name, origin, disksize }| {
            writeln!(out, "{name}: snapshot of {origin}, {}, not published", human(*disksize))
        })
    }
}
