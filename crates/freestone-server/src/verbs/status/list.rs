//! `list [PATTERN]`: a table of the devices, with columns as in zramctl.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use freestone::cow::Snapshot;
use freestone::file;
use freestone::ram::Ram;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::Entry;
use freestone_spec::size::human;
use freestone_spec::{kinds, path_text};
use serde::{Deserialize, Serialize};

use crate::changes::export_retry;
use crate::exports::{DeviceExports, Export, Withheld};
use crate::jobs::Progress;
use crate::service::Service;
use crate::verbs::Verb;
use crate::verbs::text::pattern::Pattern;
use crate::verbs::text::table::write_table;

/// Maximum wait for a check of the bases' files. If the check takes longer, the result of the last check is shown.
pub const LOOK_MAX: Duration = Duration::from_millis(200);

pub struct List;

/// Parameters of the verb `list`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Only devices whose name matches; * matches any characters, ? one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
}

/// Result of the verb `list`: the devices, in the order of their creation.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    devices: Vec<Row>,
    /// Devices of the server's state that could not be created when the server started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    missing: Vec<Missing>,
}

/// A device that is recorded in the server's state, but does not exist now.
#[derive(Debug, Serialize, Deserialize)]
pub struct Missing {
    name: String,
    why: String,
}

/// A device in the list. Sizes are in bytes; members about memory are omitted for devices that are not in memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    name: String,
    kind: String,
    disksize: u64,
    /// Name of the base of a fork or template, or of the origin of a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    /// Name of the template of a fork that was created for a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    /// Status of a snapshot with a COW device, as in dm-snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    status: Option<String>,
    /// Change of the base's file after the file was opened; None if the file is unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    changed: Option<Changed>,
    /// State of the merge of a snapshot into its origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    merge: Option<String>,
    /// Progress of a running merge, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    merged_percent: Option<u64>,
    /// Progress of a running job on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
    /// True if the device is withheld (not exported), for example because its content was not restored after a crash.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    withheld: bool,
    /// Reason why the device is withheld, if no content was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    withheld_because: Option<String>,
    /// Time of the last save, if the content of the device is kept across restarts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    saved: Option<String>,
    /// Time of the content, if the server that ended had newer content, which is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content_of: Option<String>,
    /// True if the device was adopted from a server that was killed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    adopted: bool,
    /// True if the device is zoned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    zoned: bool,
    // These members are not a flattened struct, because serde would take twice as long to parse it.
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
    /// Memory limit of a fork itself; `mem_limit` is the limit of its family (a base and its forks, which
    /// share memory).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_mem_limit: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mem_used_max: Option<u64>,
    /// Backing device of the family, which its RAM disks share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backing: Option<Backing>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    same_pages: Option<u64>,
    exports: Vec<Export>,
    /// Exports recorded in the server's state that could not be published.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    absent_exports: Vec<AbsentExport>,
}

/// An export that is recorded in the server's state, but not published now.
#[derive(Debug, Serialize, Deserialize)]
pub struct AbsentExport {
    /// Address of the export.
    address: String,
    why: String,
    /// True if the record of the export cannot be parsed, so that publishing is not retried.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    unread: bool,
}

/// Fill level of a backing device, in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Backing {
    used_bytes: u64,
    size: u64,
}

impl Backing {
    /// Returns the used part of the backing device in percent, rounded up, so that only an empty device shows 0.
    fn percent(&self) -> u64 {
        (self.used_bytes * 100).div_ceil(self.size.max(1))
    }
}

/// A change of the file of a base, which must not change while forks use it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    #[serde(with = "path_text")]
    file: PathBuf,
    /// `modified`, `replaced`, `removed` or `modified while no server ran`.
    how: String,
}

impl Changed {
    /// Returns the change of the base's file that the last check found, or a change before the server
    /// started. Returns None if the file is unchanged.
    pub fn of(service: &Service, entry: &Entry) -> Option<Self> {
        let changed = entry.kind.changed().map(|(file, how)| Self { file, how: how.to_string() });
        changed.or_else(|| {
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

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        file::check_now(LOOK_MAX);
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
                writeln!(out, "{name}: has the content of {when}; later changes were lost with the server")?;
            }
            for AbsentExport { address, why, unread } in absent_exports {
                let then = if *unread {
                    format!("`freestone unpublish {name}` gives it up")
                } else {
                    format!("it is tried again every {} s", export_retry::PAUSE.as_secs())
                };
                writeln!(out, "{name}: not published at {address}: {why}; {then}")?;
            }
        }
        reply.missing.iter().try_for_each(|Missing { name, why }| {
            writeln!(out, "{name}: is not there again, {why}; `freestone remove {name}` forgets it")
        })
    }
}

const HEADER: [&str; 14] = [
    "NAME",
    "KIND",
    "DISKSIZE",
    "DATA",
    "COMPR",
    "ALGORITHM",
    "MEM-USED",
    "MEM-MAX",
    "MEM-LIMIT",
    "BACKING",
    "ZERO-PAGES",
    "BASE",
    "CLIENTS",
    "EXPORTS",
];
/// Columns aligned to the left. The other columns are numbers, aligned to the right.
const TEXT_COLUMNS: [&str; 5] = ["NAME", "KIND", "ALGORITHM", "BASE", "EXPORTS"];

/// Returns the devices that are recorded in the server's state, but do not exist now.
pub fn missing(service: &Service) -> impl Iterator<Item = Missing> {
    service.records.all_missing().into_iter().map(|(name, why)| Missing { name, why })
}

/// Returns the row of a device in the result.
pub fn row(entry: &Entry, service: &Service) -> Row {
    let ram = entry.ram_data();
    let stat = ram.map(Ram::mm_stat);
    let status = entry.kind.cow().map(|snapshot| snapshot.status().to_string());
    let withheld = service.exports.withheld(entry.name());
    let merge = entry.kind.cow().and_then(|snapshot| kinds::merge(&snapshot.merge_status()));
    Row {
        name: entry.name().to_owned(),
        kind: entry.kind.name().to_owned(),
        disksize: entry.size(),
        base: entry.spec.kind.parent_name().map(str::to_owned),
        template: entry.template.clone(),
        status,
        changed: Changed::of(service, entry),
        merge: merge.as_ref().and_then(serde_json::Value::as_str).map(str::to_owned),
        merged_percent: entry.kind.cow().and_then(Snapshot::merged_percent),
        progress: service.jobs.progress_of(entry.name()),
        withheld: withheld.is_some(),
        withheld_because: match withheld {
            Some(Withheld::Other(why)) => Some(why.to_owned()),
            _ => None,
        },
        saved: service.saves.saved(entry),
        content_of: service.saves.stale_since(entry.name()),
        adopted: entry.is_adopted,
        zoned: entry.layers.zones.is_some(),
        orig_data_size: stat.map(|stat| stat.orig_data_size),
        compr_data_size: stat.map(|stat| stat.compr_data_size),
        comp_algorithm: ram.map(|ram| ram.config().comp_algorithm.to_string()),
        mem_used_total: stat.map(|stat| stat.mem_used_total),
        mem_limit: stat.map(|stat| stat.mem_limit),
        own_mem_limit: ram.map(|ram| ram.over_stat().mem_limit).filter(|limit| *limit > 0),
        mem_used_max: stat.map(|stat| stat.mem_used_max),
        backing: ram
            .and_then(Ram::backing)
            .map(|backing| Backing { used_bytes: backing.used_bytes, size: backing.size }),
        same_pages: stat.map(|stat| stat.same_pages),
        exports: service.exports.of(entry.name()),
        absent_exports: service.exports.read(entry.name(), absent_exports),
    }
}

fn absent_exports(device: &DeviceExports) -> Vec<AbsentExport> {
    let absent = device.absent().map(|(address, why)| (address, why, false));
    let unread = device.unparsed.iter().map(|export| (export.address(), &*export.why, true));
    let row = |(address, why, unread): (_, &str, _)| AbsentExport { address, why: why.to_owned(), unread };
    absent.chain(unread).map(row).collect()
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
        size(row.mem_used_max),
        match (row.own_mem_limit, row.mem_limit) {
            (None, Some(0)) => "none".into(),
            (own, of_family) => size(own.or(of_family)),
        },
        row.backing.as_ref().map_or_else(|| "-".to_owned(), |backing| format!("{}%", backing.percent())),
        row.same_pages.map_or_else(|| "-".to_owned(), |pages| pages.to_string()),
        row.base.clone().unwrap_or_else(|| "-".to_owned()),
        // A fork of a template has exactly the one connection that it was created for.
        (row.exports.iter().map(|e| e.connections).sum::<usize>() + usize::from(row.template.is_some()))
            .to_string(),
        if exports.is_empty() { "-".into() } else { exports.join(" ") },
    ]
}

/// Returns the kind of a device, followed by unusual states such as `withheld` or `changed`.
fn kind(row: &Row) -> String {
    let mut text = row.kind.clone();
    if row.zoned {
        text.push_str(" zoned");
    }
    if row.adopted {
        text.push_str(" adopted");
    }
    if row.withheld {
        let has_content = row.content_of.is_some() || row.changed.is_some() || row.withheld_because.is_some();
        text.push_str(if has_content { " withheld" } else { " lost, withheld" });
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
        let percent = done_bytes.saturating_mul(100).checked_div(*total_bytes);
        let percent = percent.map_or_else(String::new, |percent| format!(" {percent}%"));
        text.extend([" (", verb, &percent, ")"]);
    }
    text
}
