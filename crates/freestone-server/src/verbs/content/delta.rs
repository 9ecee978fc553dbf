//! `delta show|save|apply NAME [FILE]`: the changes of a fork or snapshot over its base, as a qcow2 overlay.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use clap::Args;
use freestone::device::Device;
use freestone::qcow2::Format;
use freestone::qcow2::delta::{self, ChangedRange, DeltaError};
use freestone::replace::ReplacePolicy;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::exports::FORCE;
use crate::jobs::{Job, JobKind};
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::{Verb, check_bare, errno_of_write, hint_of_write, left_behind, show_left_behind};

/// Maximum number of changed extents that `delta show` lists.
const ROWS_MAX: usize = 4096;

/// Parameters of the verb `delta.show`.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Name {
    /// The fork or snapshot
    name: String,
}

/// Parameters of the verb `delta.save`.
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

/// Parameters of the verb `delta.apply`.
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
    /// Makes the path of the overlay absolute, because the server writes the file.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.file = absolute(&self.name, &self.file)?;
        Ok(self)
    }
}

impl ApplyParams {
    /// Makes the path of the overlay absolute, because the server reads the file.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.file = absolute(&self.name, &self.file)?;
        Ok(self)
    }
}

/// Makes a path absolute with the client's working directory, because the server has another one. `name` is
/// the prefix of error messages.
pub fn absolute(name: &str, path: &Path) -> Result<PathBuf, Usage> {
    if path.as_os_str().is_empty() {
        return Err(Usage(format!("{name}: a path is missing")));
    }
    let here = env::current_dir();
    let here = here.map_err(|e| Usage(format!("the working directory cannot be found: {e}")))?;
    Ok(here.join(path))
}

// ---- show ---------------------------------------------------------------------------------------

/// The verb `delta.show`, which lists the changes of a fork or snapshot.
pub struct Show;

/// Result of `delta.show`: the changes of a device.
#[derive(Debug, Serialize, Deserialize)]
pub struct ShowReply {
    name: String,
    /// Name of the device's base, or of a snapshot's origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    /// Number of changed bytes.
    bytes: u64,
    /// Number of changed bytes that are known to read as zeroes.
    zero_bytes: u64,
    /// Number of changed extents.
    extents: u64,
    /// The first changed extents, at most [`ROWS_MAX`].
    rows: Vec<Row>,
}

/// A changed extent; offset and length are in bytes.
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

    fn run(service: &Service, params: Name) -> Result<ShowReply, RpcError> {
        let name = params.name;
        let entry = service.find(&name)?;
        let view = open_changes(service, &entry, "delta show")?;
        let mut rows = Vec::new();
        let summary = delta::for_each_change(&*view.device, &mut |ChangedRange { offset, len, zero }| {
            if rows.len() < ROWS_MAX {
                rows.push(Row { offset, length: len, zero });
            }
            !view.job.should_stop()
        });
        let summary = summary.map_err(|error| failed(&name, "show", &error))?;
        if view.job.should_stop() {
            return Err(view.job.cancelled("nothing was changed"));
        }
        Ok(ShowReply {
            base: entry.spec.kind.parent_name().map(str::to_owned),
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

/// The verb `delta.save`, which writes the changes to a qcow2 overlay.
pub struct Save;

/// Result of the verb `delta.save`.
#[derive(Debug, Serialize, Deserialize)]
pub struct SaveReply {
    name: String,
    #[serde(with = "path_text")]
    file: PathBuf,
    /// Number of changed bytes.
    bytes: u64,
    zero_bytes: u64,
    /// Number of clusters of 64 KiB that contain data.
    data_clusters: u64,
    zero_clusters: u64,
    /// Size of the overlay file in bytes.
    file_bytes: u64,
    /// Unfinished files beside the overlay file, left by an interrupted save.
    #[serde(with = "path_text::several", default, skip_serializing_if = "Vec::is_empty")]
    left_behind: Vec<PathBuf>,
}

impl Verb for Save {
    const METHOD: &'static str = "delta.save";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Self::Params) -> String> = Some(|params| params.name.clone());
    type Params = NameAndFile;
    type Reply = SaveReply;

    // The device is not claimed (locked against other verbs), because a slow disk would block these verbs.
    fn run(service: &Service, params: NameAndFile) -> Result<SaveReply, RpcError> {
        let NameAndFile { name, file, force } = params;
        let entry = service.find(&name)?;
        let (base, format) = base_file(&entry, "save")?;
        let view = open_changes(service, &entry, "delta save")?;
        let job = &view.job;
        let mut progress = |done, total| job.report(done, total);
        let replace = if force { ReplacePolicy::Any } else { ReplacePolicy::SameKind };
        let options = delta::Options { replace, cancelled: &|| job.should_stop() };
        let left_behind = left_behind(&file);
        let saved = delta::save_with(&*view.device, &base, format, &file, &options, &mut progress);
        let saved = saved.map_err(|error| {
            // A shutdown fails requests that hang, so any error is reported as a cancellation if the job must
            // stop. Only the error of a failed write is kept, because it describes the state of the file.
            if job.should_stop() && !matches!(error, DeltaError::Write { .. }) {
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

/// The verb `delta.apply`, which writes the changes in an overlay to a fork.
pub struct Apply;

/// Result of the verb `delta.apply`.
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

    // The device is not claimed (locked against other verbs), because a slow disk would block these verbs.
    fn run(service: &Service, params: ApplyParams) -> Result<ApplyReply, RpcError> {
        let ApplyParams { name, file, force } = params;
        let entry = service.find(&name)?;
        let Some(fork) = entry.kind.fork() else {
            refuse!(
                EOPNOTSUPP,
                "{name}: delta apply: {} device is not a fork",
                with_article(entry.kind.name())
            );
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
                refuse!(EBUSY, "{why}, or --force writes over them");
            }
        }
        let blocks = service.exports.claim_blocks(&entry, force, FORCE)?;
        let job = service.jobs.begin(&name, "delta apply", JobKind::EXCLUSIVE)?;
        let (cancelled, progress) = (&|| job.should_stop(), &mut |done, total| job.report(done, total));
        let applied = delta::apply_cancellable(&file, &**fork, Some(&base), cancelled, progress);
        // The clients' caches are dropped also after an error, because part of the changes may be applied.
        blocks.drop_caches();
        let applied = applied.map_err(|error| match error {
            DeltaError::Cancelled => {
                job.cancelled(&format!("the applied part stays; `freestone rewind {name}` removes it"))
            }
            error => failed(&name, "apply", &error),
        })?;
        let delta::ApplyReport { data_bytes, zero_bytes } = applied;
        Ok(ApplyReply { name, file, data_bytes, zero_bytes })
    }

    fn show(_: &ApplyParams, reply: &ApplyReply, out: &mut dyn Write) -> io::Result<()> {
        let ApplyReply { name, file, data_bytes, zero_bytes } = reply;
        let (data, zero) = (human(*data_bytes), human(*zero_bytes));
        writeln!(out, "{name}: {data} written and {zero} zeroed, from {}", file.display())
    }
}

// ---- common -------------------------------------------------------------------------------------

/// A view of the changes of a device, and the job that prevents other verbs from changing the device.
struct ChangesView {
    device: Arc<dyn Device>,
    /// Job on the device. For a snapshot of a fork, the job also covers the origin, so that the origin is not rewound.
    job: Job,
}

/// Opens a view of the changes of a device, and begins a job on the device.
///
/// A fork may be in use, so the view shows the changes in a temporary snapshot of the fork. For a snapshot of
/// a fork, the view shows the changes of the origin over its base at the time of the snapshot. For other
/// snapshots, it shows the exceptions.
fn open_changes(service: &Service, entry: &Entry, verb: &'static str) -> Result<ChangesView, RpcError> {
    let name = entry.name();
    check_bare(entry, "looked into")?;
    let begin = |names: &[&str]| {
        let job = service.jobs.begin_on(names, verb, JobKind::EXCLUSIVE)?;
        job.respond_started(json!({}));
        Ok::<_, RpcError>(job)
    };
    let refuse = |errno, why: &str| Err(RpcError::failed(errno, format!("{name}: {verb}: {why}")));
    let (fork, snapshot) = (entry.kind.fork(), entry.kind.memory_snapshot());
    match (fork, snapshot, entry.device()) {
        (Some(fork), _, _) => {
            let job = begin(&[name])?;
            let device = fork.snapshot().and_then(|snapshot| snapshot.over_base());
            let device = device.map_err(|e| refusal!(ENOMEM, "{name}: {e}"))?;
            Ok(ChangesView { device: Arc::new(device), job })
        }
        (None, Some(snapshot), _) if !entry.dependencies().is_empty() => {
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
            let device = device.map_err(|e| refusal!(EIO, "{name}: {e}"))?;
            Ok(ChangesView { device: Arc::new(device), job })
        }
        (None, in_memory, Some(device)) if in_memory.is_some() || entry.kind.cow().is_some() => {
            Ok(ChangesView { device: Arc::clone(device), job: begin(&[name])? })
        }
        _ => {
            let kind = with_article(entry.kind.name());
            let why = format!("{kind} device has no changes over a base; forks and snapshots have");
            refuse(Errno::EOPNOTSUPP, &why)
        }
    }
}

/// Returns the path and format of the file that is the base of a fork. For a snapshot of a fork, returns
/// those of the fork's base.
fn base_file(entry: &Entry, verb: &str) -> Result<(PathBuf, Format), RpcError> {
    // A restored device is refused, because its base may be a snapshot in the saved file.
    let is_over_base = entry.kind.fork().or(entry.kind.memory_snapshot()).is_some();
    let base = match entry.dependencies() {
        [base] if is_over_base && !matches!(entry.spec.kind, KindSpec::Restored(_)) => Some(base),
        _ => None,
    };
    let image = base.and_then(|base| base.spec.kind.image());
    image.map(|(path, format)| (path.to_owned(), format)).ok_or_else(|| {
        let why = "only a fork of a file or qcow2 image, or a snapshot of one, has a file for a base";
        rpc_error!(EOPNOTSUPP, "{}: delta {verb}: {why}", entry.name())
    })
}

fn failed(name: &str, verb: &str, error: &DeltaError) -> RpcError {
    let errno = match error {
        DeltaError::NoChanges | DeltaError::NotWritable(_) => Errno::EOPNOTSUPP,
        DeltaError::DeviceSize { .. } | DeltaError::Base { .. } | DeltaError::Foreign { .. } => Errno::EINVAL,
        DeltaError::Write { source, .. } => errno_of_write(source),
        DeltaError::Apply { error: freestone::device::Error::NoSpace, .. } => Errno::ENOSPC,
        _ => Errno::EIO,
    };
    let hint = if let DeltaError::Write { source, .. } = error { hint_of_write(source) } else { "" };
    RpcError::failed(errno, format!("{name}: delta {verb}: {error}{hint}"))
}
