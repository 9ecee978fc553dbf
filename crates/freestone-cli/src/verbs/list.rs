//! `list [PATTERN]`: a table whose columns follow zramctl.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use freestone::cow::Snapshot;
use freestone::file;
use freestone::ram::Ram;
use freestone_spec::kinds;
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use super::Verb;
use super::pattern::Pattern;
use super::table::write_table;
use crate::again;
use crate::control::protocol::Fault;
use crate::exports::Export;
use crate::job::Progress;
use crate::service::Service;

/// How long a look at the files of bases is waited for; after that, what the last one saw is shown.
pub const LOOK_MAX: Duration = Duration::from_millis(200);

/// The verb.
pub struct List;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Only devices whose name matches; * stands for any characters, ? for one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
}

/// The devices in the order in which they were made.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    devices: Vec<Row>,
    /// Those of the state that could not be made again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    missing: Vec<Missing>,
}

/// A device that is not there.
#[derive(Debug, Serialize, Deserialize)]
pub struct Missing {
    name: String,
    why: String,
}

/// One device; all sizes in bytes. What only memory has is absent elsewhere.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    name: String,
    kind: String,
    disksize: u64,
    /// Of forks and templates; the origin of a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    /// Of a fork that was made for a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    /// Of a file's snapshot, in dm's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    status: Option<String>,
    /// A file of a base is not what it was when it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    changed: Option<Changed>,
    /// How far its merge is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    merge: Option<String>,
    /// Of one that runs, how much is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    merged_percent: Option<u64>,
    /// A verb that takes long runs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
    /// Its content was lost with a server, and its exports are withheld.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    withheld: bool,
    /// Why it is withheld, where nothing was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    withheld_because: Option<String>,
    /// Its last save, where its content is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    saved: Option<String>,
    /// Of when its content is, where a server that ended had a newer one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content_of: Option<String>,
    /// It has zones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    zoned: bool,
    // Not a structure that is flattened: serde takes twice as long to read that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    orig_data_size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compr_data_size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    comp_algorithm: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mem_used_total: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mem_limit: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mem_used_max: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    same_pages: Option<u64>,
    exports: Vec<Export>,
    /// Exports of the state that cannot be published now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    absent_exports: Vec<AbsentExport>,
}

/// An export of the state that is not published.
#[derive(Debug, Serialize, Deserialize)]
pub struct AbsentExport {
    /// Where it is to be.
    address: String,
    why: String,
    /// The record cannot be understood, so the export is not retried.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    unread: bool,
}

/// What became of a file that is only read.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    #[serde(with = "path_text")]
    file: PathBuf,
    /// `modified`, `replaced`, `removed` or `modified while no server ran`.
    how: String,
}

impl Changed {
    /// Of a base, as of the last look; of a device whose base changed before the server started.
    pub fn of(service: &Service, entry: &Entry) -> Option<Self> {
        let now = entry.kind.changed().map(|(file, how)| Self { file, how: how.to_string() });
        now.or_else(|| {
            let file = service.saves.changed_base_of(entry.name())?;
            Some(Self { file, how: "modified while no server ran".to_owned() })
        })
    }
}

impl Verb for List {
    const METHOD: &'static str = "list";
    const READ_ONLY: bool = true;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        file::look_now(LOOK_MAX);
        let pattern = Pattern::new(params.pattern.as_deref().unwrap_or("*"));
        let entries = service.registry.all();
        let devices = entries.iter().filter(|e| pattern.matches(e.name())).map(|e| row(e, service));
        let devices = devices.collect();
        let missing = missing(service).filter(|missing| pattern.matches(&missing.name)).collect();
        Ok(Reply { devices, missing })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let rows: Vec<_> = reply.devices.iter().map(cells).collect();
        write_table(HEADER, &TEXT_COLUMNS, &rows, out)?;
        for Row { name, content_of, absent_exports, .. } in &reply.devices {
            if let Some(when) = content_of {
                writeln!(out, "{name}: has the content of {when}; what came later ended with the server")?;
            }
            for AbsentExport { address, why, unread } in absent_exports {
                let then = if *unread {
                    format!("`freestone unpublish {name}` gives it up")
                } else {
                    format!("it is tried again every {} s", again::PAUSE.as_secs())
                };
                writeln!(out, "{name}: not published at {address}: {why}; {then}")?;
            }
        }
        reply.missing.iter().try_for_each(|Missing { name, why }| {
            writeln!(out, "{name}: is not there again, {why}; `freestone remove {name}` forgets it")
        })
    }
}

const HEADER: [&str; 13] = [
    "NAME",
    "KIND",
    "DISKSIZE",
    "DATA",
    "COMPR",
    "ALGORITHM",
    "TOTAL",
    "MEM-LIMIT",
    "MEM-USED",
    "ZERO-PAGES",
    "BASE",
    "CLIENTS",
    "EXPORTS",
];
/// Aligned to the left; the others are numbers.
const TEXT_COLUMNS: [&str; 5] = ["NAME", "KIND", "ALGORITHM", "BASE", "EXPORTS"];

/// The devices of the state that are not there.
pub fn missing(service: &Service) -> impl Iterator<Item = Missing> {
    service.records.all_missing().into_iter().map(|(name, why)| Missing { name, why })
}

/// What is told of a device.
pub fn row(entry: &Entry, service: &Service) -> Row {
    let ram = entry.in_memory();
    let stat = ram.map(Ram::mm_stat);
    let status = entry.kind.cow().map(|snapshot| snapshot.status().to_string());
    let merge = entry.kind.cow().and_then(|snapshot| kinds::merge(&snapshot.merge_status()));
    Row {
        name: entry.name().to_owned(),
        kind: entry.kind.name().to_owned(),
        disksize: entry.size(),
        base: entry.spec.kind.below().map(str::to_owned),
        template: entry.template.clone(),
        status,
        changed: Changed::of(service, entry),
        merge: merge.as_ref().and_then(serde_json::Value::as_str).map(str::to_owned),
        merged_percent: entry.kind.cow().and_then(Snapshot::merged_percent),
        progress: service.jobs.show(entry.name()),
        withheld: service.withheld.has(entry.name()),
        withheld_because: service.withheld.why_whole(entry.name()).map(str::to_owned),
        saved: service.saves.saved(entry),
        content_of: service.saves.behind_of(entry.name()),
        zoned: entry.layers.zones.is_some(),
        orig_data_size: stat.map(|stat| stat.orig_data_size),
        compr_data_size: stat.map(|stat| stat.compr_data_size),
        comp_algorithm: ram.map(|ram| ram.config().comp_algorithm.to_string()),
        mem_used_total: stat.map(|stat| stat.mem_used_total),
        mem_limit: stat.map(|stat| stat.mem_limit),
        mem_used_max: stat.map(|stat| stat.mem_used_max),
        same_pages: stat.map(|stat| stat.same_pages),
        exports: service.exports.of(entry.name()),
        absent_exports: absent_exports(entry, service),
    }
}

fn absent_exports(entry: &Entry, service: &Service) -> Vec<AbsentExport> {
    let absent = service.exports.absent.of(entry.name()).into_iter();
    let absent = absent.map(|one| AbsentExport { address: one.place(), why: one.why, unread: false });
    let unread = service.exports.absent.unread(entry.name()).into_iter();
    let unread = unread.map(|one| AbsentExport { address: one.place(), why: one.why, unread: true });
    absent.chain(unread).collect()
}

fn cells(row: &Row) -> [String; HEADER.len()] {
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), human);
    let exports: Vec<_> = row
        .exports
        .iter()
        .map(|e| match (e.read_only, e.template) {
            (true, _) => format!("{} (ro)", e.address),
            (false, true) => format!("{} (template)", e.address),
            (false, false) => e.address.clone(),
        })
        .collect();
    [
        row.name.clone(),
        kind(row),
        human(row.disksize),
        size(row.orig_data_size),
        size(row.compr_data_size),
        row.comp_algorithm.clone().unwrap_or_else(|| "-".to_owned()),
        size(row.mem_used_total),
        if row.mem_limit == Some(0) { "none".into() } else { size(row.mem_limit) },
        size(row.mem_used_max),
        row.same_pages.map_or_else(|| "-".to_owned(), |pages| pages.to_string()),
        row.base.clone().unwrap_or_else(|| "-".to_owned()),
        // A fork of a template has the one that it was made for.
        (row.exports.iter().map(|e| e.connections).sum::<usize>() + usize::from(row.template.is_some()))
            .to_string(),
        if exports.is_empty() { "-".into() } else { exports.join(" ") },
    ]
}

/// With what is to be known of it at once.
fn kind(row: &Row) -> String {
    let mut text = row.kind.clone();
    if row.zoned {
        text.push_str(" zoned");
    }
    if row.withheld {
        let is_there = row.content_of.is_some() || row.changed.is_some() || row.withheld_because.is_some();
        text.push_str(if is_there { " withheld" } else { " lost, withheld" });
    }
    if row.changed.is_some() {
        text.push_str(" changed");
    }
    text.push_str(match (row.status.as_deref(), row.merge.as_deref()) {
        (Some("Invalid"), _) => " invalid",
        (Some("Overflow"), None) => " overflow",
        (_, None | Some("finished")) => "",
        (_, Some("running")) => " merging",
        (_, Some("stopped")) => " half merged",
        (_, Some(_)) => " merge failed",
    });
    if let Some(percent) = row.merged_percent {
        text.extend([" ", &percent.to_string(), "%"]);
    } else if let Some(Progress { verb, done_bytes, total_bytes, .. }) = &row.progress {
        let part = done_bytes.saturating_mul(100).checked_div(*total_bytes);
        let part = part.map_or_else(String::new, |part| format!(" {part}%"));
        text.extend([" (", verb, &part, ")"]);
    }
    text
}
