//! `save NAME[,NAME...] FILE`: what RAM disks, forks and snapshots hold, into a file.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use freestone::ram::Ram;
use freestone::replace::Replace;
use freestone::save::{BaseCheck, Options, SaveError, save_with};
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use super::delta::absolute;
use super::{Verb, check_bare, errno_of_write, hint_of_write, left_behind, show_left};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::job::Kind;
use crate::service::Service;

/// The verb.
pub struct Save;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// Ram devices, forks and snapshots of these; all are saved as they are at one moment
    #[arg(value_name = "NAME[,NAME...]")]
    names: String,
    /// The file; a saved one that is there is replaced when the new one is complete
    file: PathBuf,
    /// Save all that share memory with NAME; NAME may also be the file or image that forks were
    /// made of
    #[arg(long)]
    family: bool,
    /// Read whole bases, to tell at restoring that they are the same; else samples of them
    #[arg(long)]
    whole_base: bool,
    /// Also replace a file that is no saved device; never one that is in use
    #[arg(long)]
    force: bool,
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub names: Vec<String>,
    #[serde(with = "path_text")]
    file: PathBuf,
    #[serde(default)]
    family: bool,
    #[serde(default)]
    whole_base: bool,
    #[serde(default)]
    force: bool,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { names, file, family, whole_base, force } = line;
        let file = absolute(&names, &file)?;
        Ok(Self { names: names.split(',').map(str::to_owned).collect(), file, family, whole_base, force })
    }
}

/// What was saved.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    names: Vec<String>,
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Pages of 4 KiB that are in the file.
    pages: u64,
    /// Length of the file.
    file_bytes: u64,
    /// Unfinished files beside it that a crash left.
    #[serde(with = "path_text::several", default, skip_serializing_if = "Vec::is_empty")]
    left_behind: Vec<PathBuf>,
}

impl Verb for Save {
    const METHOD: &'static str = "save";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> =
        Some(|params| params.names.first().cloned().unwrap_or_default());
    type Params = Params;
    type Reply = Reply;

    // Takes as long as the disk does: nothing is claimed.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { names, file, family, whole_base, force } = params;
        let Some(first) = names.first().cloned() else {
            return Err(Fault::invalid("save: names: must have one at least"));
        };
        let mut entries = names.iter().map(|name| service.find(name)).collect::<Result<Vec<_>, _>>()?;
        if family {
            entries = relatives(service, &entries);
        }
        let mut devices: Vec<(&str, &Ram)> = Vec::new();
        for entry in &entries {
            let Some(ram) = entry.kind.ram() else {
                let (name, kind) = (entry.name(), a_kind(entry.kind.name()));
                let why =
                    format!("{name}: save: {kind} device is not saved; ram devices, forks and snapshots are");
                return Err(Fault::failed(Errno::EOPNOTSUPP, why));
            };
            check_bare(entry, "saved")?;
            devices.push((entry.name(), ram));
        }
        let check = if whole_base { BaseCheck::Whole } else { BaseCheck::Sampled };
        let job = service.jobs.begin(&first, Self::METHOD, Kind::ALONE)?;
        let replace = if force { Replace::Any } else { Replace::SameKind };
        let options = Options { check, replace, cancelled: &|| job.is_over() };
        let left_behind = left_behind(&file);
        let saved = save_with(&devices, &file, &options, &mut |done, total| job.note(done, total));
        let saved = saved.map_err(|error| {
            // Also another error: at the end of the server, what hangs fails. A failed write says itself
            // what is in the file's place.
            if job.is_over() && !matches!(error, SaveError::Write { .. }) {
                return job.cancelled(&format!("{} is as it was", file.display()));
            }
            let mut hint = "";
            let errno = match &error {
                SaveError::Write { source, .. } => {
                    hint = hint_of_write(source);
                    errno_of_write(source)
                }
                SaveError::Nothing | SaveError::TwiceNamed(_) | SaveError::TwiceGiven(..) => Errno::EINVAL,
                _ => Errno::EIO,
            };
            Fault::failed(errno, format!("{first}: save: {error}{hint}"))
        })?;
        let names = entries.iter().map(|entry| entry.name().to_owned()).collect();
        Ok(Reply { names, file, pages: saved.pages, file_bytes: saved.file_bytes, left_behind })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { names, file, file_bytes, left_behind, .. } = reply;
        show_left(left_behind, out)?;
        writeln!(out, "{}: saved to {}, {}", names.join(","), file.display(), human(*file_bytes))
    }
}

/// All that share memory with these, but for what belongs to a connection.
fn relatives(service: &Service, entries: &[Arc<Entry>]) -> Vec<Arc<Entry>> {
    let root = |entry: &Arc<Entry>| {
        let mut root = Arc::clone(entry);
        while let Some(parent) = parent(&root) {
            root = parent;
        }
        root
    };
    let number = |entry: &Arc<Entry>| Arc::as_ptr(entry) as usize;
    let mut family: HashSet<usize> = entries.iter().map(|entry| number(&root(entry))).collect();
    let mut found = Vec::new();
    // What stands on another came after it.
    for entry in service.registry.all() {
        let is_in = family.contains(&number(&entry))
            || parent(&entry).is_some_and(|parent| family.contains(&number(&parent)));
        if is_in {
            family.insert(number(&entry));
            if entry.kind.ram().is_some() && entry.template.is_none() {
                found.push(entry);
            }
        }
    }
    found
}

/// What a device shares memory with, or whose forks share memory with one another.
fn parent(entry: &Arc<Entry>) -> Option<Arc<Entry>> {
    entry.kind.fork().or(entry.kind.memory_snapshot())?;
    // A fork has none.
    let origin = entry.origin.as_ref().and_then(|(origin, _)| origin.upgrade());
    origin.or_else(|| entry.needs().first().cloned())
}
