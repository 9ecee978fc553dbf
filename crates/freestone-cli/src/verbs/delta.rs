//! `delta show|save|apply NAME [FILE]`: the changes of a fork or snapshot over its base, as a qcow2 overlay.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use clap::{Args, Subcommand};
use freestone::device::Device;
use freestone::qcow2::Format;
use freestone::qcow2::delta::{self, Changed, DeltaError};
use freestone::replace::Replace;
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::Entry;
use freestone_spec::kinds::KindSpec;
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::long::LongCall;
use super::{Call, Verb, check_bare, errno_of_write, hint_of_write, left_behind, show_left_behind};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::exports::FORCE;
use crate::job::{Job, JobKind};
use crate::service::Service;

/// Maximum number of extents that `show` lists.
const ROWS_MAX: usize = 4096;

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Line {
    /// List the changes of a fork or snapshot
    Show(Call<Name>),
    /// Write the changes to a qcow2 overlay on the base
    Save(LongCall<NameAndFile>),
    /// Write the changes of an overlay to a fork of the same base
    Apply(LongCall<ApplyParams>),
}

/// The parameters of `delta.show`.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Name {
    /// The fork or snapshot
    name: String,
}

/// The parameters of `delta.save`.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NameAndFile {
    /// A fork of a file or image, or a snapshot of such a fork
    pub name: String,
    /// The overlay file; an existing overlay is replaced once the new one is complete
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Replace the file even if it is not an overlay; a file in use is never replaced
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

/// The parameters of `delta.apply`.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyParams {
    /// A fork of the overlay's backing file or image
    pub name: String,
    /// The overlay file
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Apply even if clients are connected or the fork has changes already
    #[arg(long)]
    #[serde(default)]
    force: bool,
}

impl NameAndFile {
    /// Makes the path absolute.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.file = absolute(&self.name, &self.file)?;
        Ok(self)
    }
}

impl ApplyParams {
    /// Makes the path absolute.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.file = absolute(&self.name, &self.file)?;
        Ok(self)
    }
}

/// Returns a path made absolute against the client's working directory, for the server.
pub fn absolute(name: &str, path: &Path) -> Result<PathBuf, Usage> {
    if path.as_os_str().is_empty() {
        return Err(Usage(format!("{name}: a path is missing")));
    }
    let here = env::current_dir();
    let here = here.map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
    Ok(here.join(path))
}

// ---- show ---------------------------------------------------------------------------------------

/// `delta.show`.
pub struct Show;

/// Result of `delta.show`: the changes of a device.
#[derive(Debug, Serialize, Deserialize)]
pub struct ShowReply {
    name: String,
    /// The base of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    /// Changed bytes.
    bytes: u64,
    /// Changed bytes that are known to read as zeroes.
    zero_bytes: u64,
    /// Number of changed extents.
    extents: u64,
    /// The first extents.
    rows: Vec<Row>,
}

/// A changed extent, in bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    offset: u64,
    length: u64,
    zero: bool,
}

impl Verb for Show {
    const METHOD: &'static str = "delta.show";
    const READ_ONLY: bool = false;
    type Params = Name;
    type Reply = ShowReply;

    fn run(service: &Service, params: Name) -> Result<ShowReply, Fault> {
        let name = params.name;
        let entry = service.find(&name)?;
        let view = open_changes(service, &entry, "delta show")?;
        let mut rows = Vec::new();
        let summary = delta::show(&*view.device, &mut |Changed { offset, len, zero }| {
            if rows.len() < ROWS_MAX {
                rows.push(Row { offset, length: len, zero });
            }
            !view.job.is_over()
        });
        let summary = summary.map_err(|error| failed(&name, "show", &error))?;
        if view.job.is_over() {
            return Err(view.job.cancelled("nothing was changed"));
        }
        Ok(ShowReply {
            base: entry.spec.kind.below().map(str::to_owned),
            bytes: summary.bytes,
            zero_bytes: summary.zero_bytes,
            extents: summary.extents,
            rows,
            name,
        })
    }

    fn show(_: &Name, reply: &ShowReply, out: &mut dyn Write) -> io::Result<()> {
        for Row { offset, length, zero } in &reply.rows {
            writeln!(out, "{offset:>15} {length:>12}  {}", if *zero { "zero" } else { "data" })?;
        }
        if reply.rows.len() == ROWS_MAX {
            writeln!(out, "(the first {ROWS_MAX} extents)")?;
        }
        let ShowReply { name, bytes, zero_bytes, extents, .. } = reply;
        let (bytes, zero) = (human(*bytes), human(*zero_bytes));
        writeln!(out, "{name}: {bytes} of its own in {extents} places, {zero} of them zeroes")
    }
}

// ---- save ---------------------------------------------------------------------------------------

/// `delta.save`.
pub struct Save;

/// Result of `delta.save`.
#[derive(Debug, Serialize, Deserialize)]
pub struct SaveReply {
    name: String,
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Changed bytes.
    bytes: u64,
    zero_bytes: u64,
    /// Number of clusters of 64 KiB with data.
    data_clusters: u64,
    zero_clusters: u64,
    /// Length of the file in bytes.
    file_bytes: u64,
    /// Unfinished files beside it, left by a crash.
    #[serde(with = "path_text::several", default, skip_serializing_if = "Vec::is_empty")]
    left_behind: Vec<PathBuf>,
}

impl Verb for Save {
    const METHOD: &'static str = "delta.save";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = NameAndFile;
    type Reply = SaveReply;

    // Claims nothing: the verb takes as long as the disk does.
    fn run(service: &Service, params: NameAndFile) -> Result<SaveReply, Fault> {
        let NameAndFile { name, file, force } = params;
        let entry = service.find(&name)?;
        let (base, format) = base_file(&entry, "save")?;
        let view = open_changes(service, &entry, "delta save")?;
        let job = &view.job;
        let mut progress = |done, total| job.note(done, total);
        let replace = if force { Replace::Any } else { Replace::SameKind };
        let options = delta::Options { replace, cancelled: &|| job.is_over() };
        let left_behind = left_behind(&file);
        let saved = delta::save_with(&*view.device, &base, format, &file, &options, &mut progress);
        let saved = saved.map_err(|error| {
            // Any error counts as cancelled, as a shutdown fails hanging requests. The error of a failed write
            // already describes the state of the file.
            if job.is_over() && !matches!(error, DeltaError::Write { .. }) {
                return job.cancelled(&format!("{} is unchanged", file.display()));
            }
            failed(&name, "save", &error)
        })?;
        Ok(SaveReply {
            name,
            file,
            bytes: saved.changes.bytes,
            zero_bytes: saved.changes.zero_bytes,
            data_clusters: saved.data_clusters,
            zero_clusters: saved.zero_clusters,
            file_bytes: saved.file_bytes,
            left_behind,
        })
    }

    fn show(_: &NameAndFile, reply: &SaveReply, out: &mut dyn Write) -> io::Result<()> {
        let SaveReply { name, file, bytes, file_bytes, left_behind, .. } = reply;
        show_left_behind(left_behind, out)?;
        let (bytes, size) = (human(*bytes), human(*file_bytes));
        writeln!(out, "{name}: {bytes} of its own saved to {}, {size}", file.display())
    }
}

// ---- apply --------------------------------------------------------------------------------------

/// `delta.apply`.
pub struct Apply;

/// Result of `delta.apply`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ApplyReply {
    name: String,
    #[serde(with = "path_text")]
    file: PathBuf,
    data_bytes: u64,
    zero_bytes: u64,
}

impl Verb for Apply {
    const METHOD: &'static str = "delta.apply";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = ApplyParams;
    type Reply = ApplyReply;

    // Claims nothing: the verb takes as long as the disk does.
    fn run(service: &Service, params: ApplyParams) -> Result<ApplyReply, Fault> {
        let ApplyParams { name, file, force } = params;
        let entry = service.find(&name)?;
        let Some(fork) = entry.kind.fork() else {
            let why = format!("{name}: delta apply: {} device is not a fork", a_kind(entry.kind.name()));
            return Err(Fault::failed(Errno::EOPNOTSUPP, why));
        };
        let (base, _) = base_file(&entry, "apply")?;
        check_bare(&entry, "written behind its layers")?;
        service.registry.check_unused(&entry, "written")?;
        if !force {
            service.exports.check_idle(&entry)?;
            if fork.over_stat().own_bytes > 0 {
                let why = format!(
                    "{name}: delta apply: it has changes of its own; `freestone rewind {name}` first"
                );
                return Err(Fault::failed(Errno::EBUSY, format!("{why}, or --force writes over them")));
            }
        }
        let blocks = service.exports.claim_blocks(&entry, force, FORCE)?;
        let job = service.jobs.begin(&name, "delta apply", JobKind::EXCLUSIVE)?;
        let (cancelled, progress) = (&|| job.is_over(), &mut |done, total| job.note(done, total));
        let applied = delta::apply_unless(&file, &**fork, Some(&base), cancelled, progress);
        // Also after an error, as part of the changes may be applied.
        blocks.drop_caches();
        let applied = applied.map_err(|error| match error {
            DeltaError::Cancelled => {
                job.cancelled(&format!("the applied part stays; `freestone rewind {name}` removes it"))
            }
            error => failed(&name, "apply", &error),
        })?;
        let delta::Applied { data_bytes, zero_bytes } = applied;
        Ok(ApplyReply { name, file, data_bytes, zero_bytes })
    }

    fn show(_: &ApplyParams, reply: &ApplyReply, out: &mut dyn Write) -> io::Result<()> {
        let ApplyReply { name, file, data_bytes, zero_bytes } = reply;
        let (data, zero) = (human(*data_bytes), human(*zero_bytes));
        writeln!(out, "{name}: {data} written and {zero} zeroed, from {}", file.display())
    }
}

// ---- common -------------------------------------------------------------------------------------

/// A view of a device's changes, and the job that protects it.
struct ChangesView {
    device: Arc<dyn Device>,
    /// For a snapshot of a fork, the job also covers the origin, so that the origin is not rewound.
    job: Job,
}

/// Opens the changes of a device and begins a job on it.
///
/// For a fork, which may be in use, these are the changes in a temporary snapshot. For a snapshot of a fork, they are
/// the changes that its origin had over the base; for other snapshots, the exceptions.
fn open_changes(service: &Service, entry: &Entry, verb: &'static str) -> Result<ChangesView, Fault> {
    let name = entry.name();
    check_bare(entry, "looked into")?;
    let begin = |names: &[&str]| {
        let job = service.jobs.begin_on(names, verb, JobKind::EXCLUSIVE)?;
        job.respond_started(json!({}));
        Ok::<_, Fault>(job)
    };
    let refuse = |errno, why: &str| Err(Fault::failed(errno, format!("{name}: {verb}: {why}")));
    let (fork, snapshot) = (entry.kind.fork(), entry.kind.memory_snapshot());
    match (fork, snapshot, entry.device()) {
        (Some(fork), _, _) => {
            let job = begin(&[name])?;
            let device = fork.snapshot().and_then(|snapshot| snapshot.over_base());
            let device = device.map_err(|e| Fault::failed(Errno::ENOMEM, format!("{name}: {e}")))?;
            Ok(ChangesView { device: Arc::new(device), job })
        }
        (None, Some(snapshot), _) if !entry.needs().is_empty() => {
            let origin = entry.origin.as_ref();
            let origin = origin.and_then(|(origin, rewinds)| Some((origin.upgrade()?, *rewinds)));
            let lost =
                "the fork that it is a snapshot of was removed or rewound; save such a delta before that";
            let Some((origin, rewinds)) = origin else { return refuse(Errno::ENODEV, lost) };
            let job = begin(&[name, origin.name()])?;
            if origin.kind.fork().is_none() || origin.rewinds.load(Ordering::SeqCst) != rewinds {
                return refuse(Errno::ENODEV, lost);
            }
            let device = snapshot.over_base();
            let device = device.map_err(|e| Fault::failed(Errno::EIO, format!("{name}: {e}")))?;
            Ok(ChangesView { device: Arc::new(device), job })
        }
        (None, in_memory, Some(device)) if in_memory.is_some() || entry.kind.cow().is_some() => {
            Ok(ChangesView { device: Arc::clone(device), job: begin(&[name])? })
        }
        _ => {
            let kind = a_kind(entry.kind.name());
            let why = format!("{kind} device has no changes over a base; forks and snapshots have");
            refuse(Errno::EOPNOTSUPP, &why)
        }
    }
}

/// Returns the file that is the base of a fork, or of the fork that a snapshot was taken of.
fn base_file(entry: &Entry, verb: &str) -> Result<(PathBuf, Format), Fault> {
    // A restored device is refused: its base may be a snapshot of the saved file.
    let is_over_base = entry.kind.fork().or(entry.kind.memory_snapshot()).is_some();
    let base = match entry.needs() {
        [base] if is_over_base && !matches!(entry.spec.kind, KindSpec::Restored(_)) => Some(base),
        _ => None,
    };
    let image = base.and_then(|base| base.spec.kind.image());
    image.map(|(path, format)| (path.to_owned(), format)).ok_or_else(|| {
        let why = "only a fork of a file or qcow2 image, or a snapshot of one, has a file for a base";
        Fault::failed(Errno::EOPNOTSUPP, format!("{}: delta {verb}: {why}", entry.name()))
    })
}

fn failed(name: &str, verb: &str, error: &DeltaError) -> Fault {
    let errno = match error {
        DeltaError::NoChanges | DeltaError::NotWritable(_) => Errno::EOPNOTSUPP,
        DeltaError::DeviceSize { .. } | DeltaError::Base { .. } | DeltaError::Foreign { .. } => Errno::EINVAL,
        DeltaError::Write { source, .. } => errno_of_write(source),
        DeltaError::Apply { error: freestone::device::Error::NoSpace, .. } => Errno::ENOSPC,
        _ => Errno::EIO,
    };
    let hint = if let DeltaError::Write { source, .. } = error { hint_of_write(source) } else { "" };
    Fault::failed(errno, format!("{name}: delta {verb}: {error}{hint}"))
}
