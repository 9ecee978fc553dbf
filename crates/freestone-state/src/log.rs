//! The topology file and the devices recorded in it.
//!
//! A [`Log`] appends lines to the file. The log replaces the whole file if most of the content is
//! obsolete, or after a failed write. The directory is opened once, so that after a rename only the
//! sync of an open descriptor can fail. [`State`](crate::State) owns the log and holds a lock
//! during every call.
//!
//! After a failed sync, or a rename with unknown effect, the content of the file is *unknown*. No
//! line is appended until the file has been replaced durably.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone_core::mutants::{self, Mutant};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::error::StateError;
use crate::lines::{self, Line, ReadResult};
use crate::topology::Topology;

pub const TOPOLOGY_FILE: &str = "topology";
/// Name of the temporary file used while the topology is rewritten.
const NEW_FILE: &str = "topology.new";
/// Size of the largest topology file accepted, in bytes. A larger file belongs to another program.
const MAX_BYTES: u64 = 1 << 30;
/// Size of the smallest topology file that is rewritten to shrink it, in bytes.
pub const REWRITE_BYTES: u64 = 4 << 20;
/// The file is rewritten only if that shrinks it to about `1/REWRITE_PART` of its size.
const REWRITE_PART: u64 = 4;
/// Bytes reserved on the disk before a change takes effect. Added to them are [`DEVICE_BYTES`] for
/// each device of the change, and a copy of all devices, which the next start may have to write.
const RESERVE_BYTES: u64 = 128 << 10;
const DEVICE_BYTES: u64 = 1 << 10;

/// A verb that was in progress when the server ended, and whose change was rolled back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterruptedVerb {
    /// Name of the interrupted verb.
    pub verb: String,
    /// Names of the devices that the verb was changing.
    pub names: Vec<String>,
}

/// A change that has begun and is not durably committed yet.
#[derive(Debug)]
struct Pending {
    verb: String,
    names: Vec<String>,
    /// Lines of the commit, once they have been appended; otherwise empty.
    lines: Vec<Line>,
}

impl Pending {
    fn begin(&self, number: u64, synced: u64) -> Line {
        Line::Begin { begin: number, synced, verb: self.verb.clone(), names: self.names.clone() }
    }
}

#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    dir: File,
    /// The current topology file. Shared, so that one thread can sync while others append.
    file: Arc<File>,
    /// Length in bytes of the valid content. Later bytes are from a failed write.
    bytes: u64,
    /// Number of bytes from the file's start that are durable.
    synced: u64,
    /// Offset in bytes up to which disk space is reserved.
    reserved: u64,
    /// Number of appends since the start. `durable` is the number of appends that are durable.
    written: u64,
    durable: u64,
    is_unknown: bool,
    /// Another server may use the file.
    is_released: bool,
    /// The devices as of the last durable commit.
    topology: Topology,
    next: u64,
    pending: BTreeMap<u64, Pending>,
    /// True while a thread syncs the file.
    pub is_syncing: bool,
}

/// A sync of the topology file, executed without the lock of the log.
pub struct Sync {
    file: Arc<File>,
    written: u64,
    bytes: u64,
}

impl Sync {
    pub fn run(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl Log {
    /// Opens or creates the topology file of a directory. Also returns the uncommitted changes,
    /// which are dropped.
    ///
    /// # Errors
    /// Fails with a [`StateError`]; the file is then unchanged.
    pub fn open(dir_path: &Path) -> Result<(Self, Vec<InterruptedVerb>), StateError> {
        let directory_error = |error: io::Error| StateError::Directory(dir_path.to_owned(), error);
        let path = dir_path.join(TOPOLOGY_FILE);
        let dir = File::open(dir_path).map_err(directory_error)?;
        let (mut file, is_read_only) = open_file(&path).map_err(directory_error)?;
        let mut content = Vec::new();
        (&mut file).take(MAX_BYTES + 1).read_to_end(&mut content).map_err(directory_error)?;
        if content.len() as u64 > MAX_BYTES {
            return Err(StateError::Foreign(path));
        }
        let (topology, bytes, interrupted, next) = match lines::read(&content) {
            ReadResult::Whole { topology, bytes, interrupted, next } => (topology, bytes, interrupted, next),
            ReadResult::Foreign => return Err(StateError::Foreign(path)),
            ReadResult::Newer(version) => return Err(StateError::Newer(path, version)),
            ReadResult::Damaged(line) => return Err(StateError::Damaged(path, line)),
        };
        let is_cut = bytes < content.len() as u64;
        if is_cut {
            tracing::warn!(path = %path.display(), "dropping a torn line at the end of the state");
        }
        let mut log = Self {
            path,
            dir,
            file: Arc::new(file),
            bytes,
            synced: 0,
            reserved: 0,
            written: 0,
            durable: 0,
            // A read-only file cannot be appended to: the next change must replace the file, or it
            // fails.
            is_unknown: is_read_only,
            is_released: false,
            topology,
            next,
            pending: BTreeMap::new(),
            is_syncing: false,
        };
        // The rewrite drops uncommitted changes and a torn line.
        if let Err(error) = log.rewrite() {
            if bytes == 0 {
                return Err(directory_error(error));
            }
            let path = log.path.display();
            if is_read_only {
                tracing::error!(%path, %error, "the state is read-only: changes of devices fail");
            } else {
                tracing::warn!(%path, %error, "cannot rewrite the state; using the present file");
            }
            log.is_unknown |= is_cut && log.file.set_len(bytes).is_err();
            // A killed server may not have synced the last line that it wrote.
            log.is_unknown |= log.file.sync_data().and_then(|()| log.dir.sync_all()).is_err();
        }
        // The next start needs the reserved space. On a full disk that start may fail, but this one
        // continues.
        let _ = log.reserve(0);
        let interrupted = interrupted.into_iter().map(|(verb, names)| InterruptedVerb { verb, names });
        Ok((log, interrupted.collect()))
    }

    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    // ---- changes --------------------------------------------------------------------------------

    /// Reserves disk space for a change of `devices` devices, so that the change can be committed
    /// after it has taken effect.
    pub fn reserve(&mut self, devices: usize) -> io::Result<()> {
        self.check_released()?;
        self.repair()?;
        let wanted = self.bytes + RESERVE_BYTES + devices as u64 * DEVICE_BYTES;
        if self.reserved >= self.bytes + wanted {
            return Ok(());
        }
        // Also reserve space for later changes, if available.
        for bytes in [wanted + RESERVE_BYTES, wanted] {
            match fallocate(&*self.file, FallocateFlags::KEEP_SIZE, self.bytes, bytes) {
                Ok(()) => {
                    self.reserved = self.bytes + bytes;
                    return Ok(());
                }
                // Some file systems do not support fallocate; then no space is reserved.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
                Err(Errno::NOSPC | Errno::DQUOT) if bytes > wanted => {}
                Err(error) => return Err(error.into()),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Appends the begin of a change. Returns the number of the change.
    pub fn begin(&mut self, verb: &str, names: Vec<String>) -> io::Result<u64> {
        let number = self.next;
        self.next += 1;
        let pending = Pending { verb: verb.to_owned(), names, lines: Vec::new() };
        let line = pending.begin(number, self.synced);
        self.pending.insert(number, pending);
        self.append(&[line]).inspect_err(|_| drop(self.pending.remove(&number)))?;
        Ok(number)
    }

    /// Appends the lines of a commit. The caller must call [`apply`](Self::apply) when they are
    /// durable.
    pub fn commit(&mut self, number: u64, lines: &[Line]) -> io::Result<()> {
        let Some(pending) = self.pending.get_mut(&number) else { return Ok(()) };
        pending.lines = lines.to_vec();
        self.append(lines).inspect_err(|_| {
            if !self.is_unknown
                && let Some(pending) = self.pending.get_mut(&number)
            {
                // The file does not contain any of the lines.
                pending.lines.clear();
            }
        })
    }

    /// Applies a change that is committed and durable to the recorded devices.
    pub fn apply(&mut self, number: u64) {
        for line in self.pending.remove(&number).into_iter().flat_map(|pending| pending.lines) {
            match line {
                Line::Put { device, .. } => self.topology.put(device),
                Line::Gone { name, .. } => self.topology.remove(&name),
                Line::Format { .. } | Line::Begin { .. } | Line::End { .. } => {}
            }
        }
    }

    /// Drops a change that was rolled back, or whose commit could not be written.
    pub fn drop_change(&mut self, number: u64) {
        let Some(pending) = self.pending.remove(&number) else { return };
        if pending.lines.is_empty() && !self.is_unknown {
            // Commit the change without its devices. The end line need not be durable, as a begin
            // alone has no effect.
            let _ = self.append(&[Line::End { end: number }]);
        } else {
            // The file may contain the lines of the commit, so it must be rewritten.
            self.is_unknown = true;
        }
    }

    /// Appends all lines or none. If that fails, rewrites the file with the lines of all pending
    /// changes.
    fn append(&mut self, lines: &[Line]) -> io::Result<()> {
        freestone_core::trail::step!();
        self.check_released()?;
        if self.is_unknown {
            return self.rewrite();
        }
        let text = Line::text(lines);
        if let Err(error) = (&*self.file).write_all(text.as_bytes()) {
            // The file may contain a part of the text.
            self.is_unknown = self.file.set_len(self.bytes).is_err();
            self.reserved = 0;
            return self.rewrite().map_err(|_| error);
        }
        self.bytes += text.len() as u64;
        self.written += 1;
        Ok(())
    }

    /// Makes all later writes fail, because another server may use the file.
    pub fn release(&mut self) {
        self.is_released = true;
    }

    fn check_released(&self) -> io::Result<()> {
        if self.is_released { Err(io::Error::other("the server has ended")) } else { Ok(()) }
    }

    // ---- durability -----------------------------------------------------------------------------

    pub fn written(&self) -> u64 {
        self.written
    }

    pub fn is_durable(&self, written: u64) -> bool {
        self.durable >= written
    }

    /// Rewrites the file if its content is unknown, and returns true. Returns false if the content
    /// is known.
    pub fn repair(&mut self) -> io::Result<bool> {
        if self.is_unknown { self.rewrite().map(|()| true) } else { Ok(false) }
    }

    pub fn sync(&self) -> Sync {
        Sync { file: Arc::clone(&self.file), written: self.written, bytes: self.bytes }
    }

    /// Records the result of a sync, unless the file was replaced meanwhile.
    pub fn record_sync(&mut self, sync: &Sync, outcome: io::Result<()>) {
        if !Arc::ptr_eq(&sync.file, &self.file) {
            return;
        }
        match outcome {
            Ok(()) => (self.synced, self.durable) = (sync.bytes, sync.written),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "sync of the state failed; rewriting the file");
                // After a failed sync the kernel marks the dirty pages as clean, so another sync
                // would wrongly succeed.
                self.is_unknown = true;
            }
        }
    }

    /// Rewrites the file if most of it is obsolete. If that fails, the next change tries again.
    pub fn shrink(&mut self) {
        if self.bytes < REWRITE_BYTES {
            return;
        }
        let live: usize =
            self.topology.devices().map(|device| device.words.len() + device.name.len() + 128).sum();
        if self.bytes / REWRITE_PART < live as u64 {
            return;
        }
        if let Err(error) = self.rewrite() {
            tracing::warn!(path = %self.path.display(), %error, "cannot shrink the state");
        }
    }

    /// Replaces the file by one with the devices and all pending changes. The new file is durable
    /// on return.
    ///
    /// # Errors
    /// If a step before the rename fails, the old file remains in use. If a later step fails, the
    /// content is unknown.
    fn rewrite(&mut self) -> io::Result<()> {
        self.check_released()?;
        if self.is_unknown && mutants::on(Mutant::StateGivesUp) {
            return Err(io::Error::other("an earlier write has failed"));
        }
        let text = self.text();
        let new = self.path.with_file_name(NEW_FILE);
        // A partial file that is not removed would occupy the last free space.
        let remove = |_: &io::Error| _ = fs::remove_file(&new);
        let file = create(&new, text.as_bytes()).inspect_err(remove)?;
        if let Err(error) = fs::rename(&new, &self.path) {
            match is_at(&file, &self.path) {
                // The rename took effect although it returned an error.
                Ok(true) => {}
                Ok(false) => return Err(error).inspect_err(remove),
                Err(_) => {
                    self.is_unknown = true;
                    return Err(error);
                }
            }
        }
        if mutants::on(Mutant::RewriteUnseen) {
            self.dir.sync_all()?;
        }
        (self.file, self.bytes, self.synced, self.reserved) = (Arc::new(file), text.len() as u64, 0, 0);
        self.is_unknown = true;
        self.dir.sync_all()?;
        self.is_unknown = false;
        (self.synced, self.durable) = (self.bytes, self.written);
        Ok(())
    }

    fn text(&mut self) -> String {
        let mut all = vec![Line::first()];
        if self.topology.devices().next().is_some() {
            let number = self.next;
            self.next += 1;
            all.push(Line::Begin { begin: number, synced: 0, verb: "rewrite".to_owned(), names: Vec::new() });
            all.extend(
                self.topology.devices().map(|device| Line::Put { put: number, device: device.clone() }),
            );
            all.push(Line::End { end: number });
        }
        for (number, pending) in &self.pending {
            all.push(pending.begin(*number, 0));
            all.extend(pending.lines.iter().cloned());
        }
        Line::text(&all)
    }
}

/// Opens a file for appending, and creates it if necessary. Returns the file, and true if its file
/// system is read-only.
pub fn open_file(path: &Path) -> io::Result<(File, bool)> {
    match OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path) {
        Ok(file) => Ok((file, false)),
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => match File::open(path) {
            Ok(file) => Ok((file, true)),
            // The file system is read-only and the file does not exist.
            Err(_) => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// Creates a file with this content, or overwrites an old one. The content is durable on return.
fn create(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().append(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_len(0)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(file)
}

/// Returns true if the path refers to the open file `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (file, at) = (file.metadata()?, fs::symlink_metadata(path)?);
    Ok((file.dev(), file.ino()) == (at.dev(), at.ino()))
}

#[cfg(test)]
impl Log {
    pub fn exchange_file(&mut self, file: File) -> Arc<File> {
        self.reserved = u64::MAX;
        std::mem::replace(&mut self.file, Arc::new(file))
    }

    pub fn exchange_dir(&mut self, dir: File) -> File {
        std::mem::replace(&mut self.dir, dir)
    }
}
