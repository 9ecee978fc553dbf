//! `save NAME[,NAME...] FILE`: writes the content of RAM disks, forks and snapshots to a file.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use clap::builder::{StringValueParser, TypedValueParser};
use freestone::ram::Ram;
use freestone::replace::ReplacePolicy;
use freestone::save::{BaseCheck, Options, SaveError, save_with};
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::content::delta::absolute;
use crate::verbs::{Verb, check_bare, errno_of_write, hint_of_write, left_behind, show_left_behind};

pub struct Save;

/// Names in one argument. With `Vec` as the type of the field, the argument could be repeated.
type Names = Vec<String>;

/// Parameters of the verb `save`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Ram devices, forks and snapshots; all are saved as of one moment
    #[arg(value_name = "NAME[,NAME...]", value_parser = names_parser())]
    pub names: Names,
    /// The file; an existing saved file is replaced once the new one is complete
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Save the whole family of NAME; NAME may also be the base of forks
    #[arg(long)]
    #[serde(default)]
    family: bool,
    /// Hash whole bases, so that restore can verify them; otherwise samples of them
    #[arg(long)]
    #[serde(default)]
    whole_base: bool,
    /// Replace the file even if it is not a saved file; a file in use is never replaced
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

fn names_parser() -> impl TypedValueParser<Value = Names> {
    StringValueParser::new().map(|names| -> Names { names.split(',').map(str::to_owned).collect() })
}

impl Params {
    /// Makes the path of the file absolute, because the server writes the file.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.file = absolute(&self.names.join(","), &self.file)?;
        Ok(self)
    }
}

/// Result of the verb `save`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    names: Vec<String>,
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Number of pages of 4 KiB in the file.
    pages: u64,
    /// Size in bytes of the saved file.
    file_bytes: u64,
    /// Unfinished files beside the saved file, left by an interrupted save.
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

    // The devices are not claimed (locked against other verbs), because a slow disk would block these verbs.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { names, file, family, whole_base, force } = params;
        let Some(first) = names.first().cloned() else {
            refuse!(invalid, "save: names: must have one at least");
        };
        let mut entries = names.iter().map(|name| service.find(name)).collect::<Result<Vec<_>, _>>()?;
        if family {
            entries = family_members(service, &entries);
        }
        let mut devices: Vec<(&str, &Ram)> = Vec::new();
        for entry in &entries {
            let Some(ram) = entry.kind.ram() else {
                let (name, kind) = (entry.name(), with_article(entry.kind.name()));
                refuse!(
                    EOPNOTSUPP,
                    "{name}: save: {kind} device is not saved; ram devices, forks and snapshots are"
                );
            };
            check_bare(entry, "saved")?;
            devices.push((entry.name(), ram));
        }
        let check = if whole_base { BaseCheck::Whole } else { BaseCheck::Sampled };
        let job = service.jobs.begin(&first, Self::METHOD, JobKind::EXCLUSIVE)?;
        let replace = if force { ReplacePolicy::Any } else { ReplacePolicy::SameKind };
        let options = Options { check, replace, cancelled: &|| job.should_stop() };
        let left_behind = left_behind(&file);
        let saved = save_with(&devices, &file, &options, &mut |done, total| job.report(done, total));
        let saved = saved.map_err(|error| {
            // A shutdown fails requests that hang, so any error is reported as a cancellation if the job must
            // stop. Only the error of a failed write is kept, because it describes the state of the file.
            if job.should_stop() && !matches!(error, SaveError::Write { .. }) {
                return job.cancelled(&format!("{} is unchanged", file.display()));
            }
            let mut hint = "";
            let errno = match &error {
                SaveError::Write { source, .. } => {
                    hint = hint_of_write(source);
                    errno_of_write(source)
                }
                SaveError::NoDevices | SaveError::DuplicateName(_) | SaveError::DuplicateDevice(..) => {
                    Errno::EINVAL
                }
                _ => Errno::EIO,
            };
            RpcError::failed(errno, format!("{first}: save: {error}{hint}"))
        })?;
        let names = entries.iter().map(|entry| entry.name().to_owned()).collect();
        Ok(Reply { names, file, pages: saved.pages, file_bytes: saved.file_bytes, left_behind })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { names, file, file_bytes, left_behind, .. } = reply;
        show_left_behind(left_behind, out)?;
        writeln!(out, "{}: saved to {}, {}", names.join(","), file.display(), human(*file_bytes))
    }
}

/// Returns all devices in the families of `entries` (a base with its forks and snapshots), without forks that
/// belong to a connection.
fn family_members(service: &Service, entries: &[Arc<Entry>]) -> Vec<Arc<Entry>> {
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
    // The registry is in the order of creation, so a parent precedes its dependents.
    for entry in service.registry.all() {
        let is_member = family.contains(&number(&entry))
            || parent(&entry).is_some_and(|parent| family.contains(&number(&parent)));
        if is_member {
            family.insert(number(&entry));
            if entry.kind.ram().is_some() && entry.template.is_none() {
                found.push(entry);
            }
        }
    }
    found
}

/// Returns the parent of a fork or snapshot: the origin of a snapshot, or the base of a fork. Returns None
/// for other devices.
fn parent(entry: &Arc<Entry>) -> Option<Arc<Entry>> {
    entry.kind.fork().or(entry.kind.memory_snapshot())?;
    // Only snapshots have an origin.
    let origin = entry.origin.as_ref().and_then(|(origin, _)| origin.upgrade());
    origin.or_else(|| entry.dependencies().first().cloned())
}
