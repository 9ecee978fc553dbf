//! `snapshot ORIGIN[,ORIGIN...] NAME[,NAME...]`: takes snapshots of one or several devices at the same moment.

use std::env;
use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;
use freestone_spec::schema::SNAPSHOT;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;
use crate::verbs::text::words;

/// Keys whose value is a list with one value for each snapshot. All others apply to every snapshot.
const PER_SNAPSHOT_KEYS: [&str; 2] = ["cow", "cow_size"];

pub struct Snapshot;

/// Command line of the verb `snapshot`.
#[derive(Debug, Args)]
pub struct Line {
    /// Writable ram and null devices, forks and files
    #[arg(value_name = "ORIGIN[,ORIGIN...]")]
    origins: String,
    /// One name for each origin
    #[arg(value_name = "NAME[,NAME...]")]
    names: String,
    #[arg(value_name = "KEY=VALUE", value_parser = crate::verbs::text::keys::words_parser())]
    #[arg(help = "Keys of the snapshot, see below; several origins have cow=A,B; tls_clients as for serve")]
    words: Vec<String>,
}

/// Parameters of the verb `snapshot` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Origin, name and keys of each snapshot: `[{"origin": "db", "name": "db-1", "cow": "/x.cow", ...}]`.
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
        let own = SNAPSHOT[1..].iter().map(|key| key.name);
        let allowed: Vec<_> = own.chain(["tls_clients"]).collect();
        let mut values = words::parse(&list, "snapshot", &words, &allowed)?;
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
            let mut entries = Entries::new(name, "snapshot")?;
            let own = lists.iter().map(|(key, parts)| (*key, parts[index].as_str()));
            let common = values.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            for (key, value) in own.filter(|(_, value)| !value.is_empty()).chain(common) {
                entries.add(key, value)?;
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
    fn specs(&self) -> Result<Vec<Spec>, RpcError> {
        if self.snapshots.is_empty() {
            refuse!(invalid, "snapshots: must have one at least");
        }
        self.snapshots.iter().map(parse_spec).collect()
    }
}

/// Parses a snapshot in the request. Its keys are those of the device kind `snapshot`.
fn parse_spec(snapshot: &Map<String, Value>) -> Result<Spec, RpcError> {
    let Some(Value::String(name)) = snapshot.get("name") else {
        refuse!(invalid, "snapshots: each needs a name, a text");
    };
    let mut entries = Entries::new(name, "snapshot")?;
    for (key, value) in snapshot.iter().filter(|(key, _)| *key != "name") {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            _ => refuse!(invalid, "{name}: {key}: must be a text or a boolean"),
        };
        entries.add(key, &text)?;
    }
    Ok(Spec::from_entries(entries)?)
}

/// Result of the verb `snapshot`: the new snapshots, in the order of the request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    snapshots: Vec<CreatedSnapshot>,
}

/// A snapshot that was taken.
#[derive(Debug, Serialize, Deserialize)]
struct CreatedSnapshot {
    name: String,
    origin: String,
    /// Size of the device in bytes.
    disksize: u64,
}

impl Verb for Snapshot {
    const METHOD: &'static str = "snapshot";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let specs = params.specs()?;
        let claim = service.claim_new(Self::METHOD, &specs)?;
        let names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let recording = Recording::begin(service, &claim, Self::METHOD, &names)?;
        let made = service.snapshot(&claim, specs)?;
        let mut entries = made.iter();
        let begun = entries.try_for_each(|entry| entry.kind.begin_merge(entry, &service.registry));
        begun.map_err(RpcError::from).and_then(|()| recording.commit()).inspect_err(|_| {
            for entry in &made {
                service.undo_create(&claim, entry);
            }
        })?;
        let snapshots = made.iter().map(|entry| CreatedSnapshot {
            name: entry.name().to_owned(),
            origin: entry.spec.kind.parent_name().unwrap_or_default().to_owned(),
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
