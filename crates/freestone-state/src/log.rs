//! The file `topology`, and the devices that it lists.
//!
//! A [`Log`] appends lines, and replaces the whole file when most of it is past or when an earlier write
//! failed. The directory is opened once, so that only a sync of an open descriptor can fail after a rename.
//! [`State`](crate::State) owns the log, and holds a lock around every call.
//!
//! After a failed sync, or a rename whose effect is not known, the file is *unknown*: nothing is appended
//! until the file has been replaced and is durable.

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
use crate::lines::{self, Line, Read};
use crate::topology::Topology;

/// Name of the file.
pub const TOPOLOGY: &str = "topology";
/// Name of the new file until it replaces the old one.
const NEW: &str = "topology.new";
/// Largest file that is read, in bytes. A larger file is not a list of devices.
const MAX_BYTES: u64 = 1 << 30;
/// Smallest file, in bytes, that is replaced to shrink it.
pub const REWRITE_BYTES: u64 = 4 << 20;
/// The file is replaced if that shrinks it to `1/REWRITE_PART` of its size.
const REWRITE_PART: u64 = 4;
/// Bytes reserved on the disk before a change takes effect, beside [`DEVICE_BYTES`] for each of its devices
/// and a copy of all devices, which the next start may have to write.
const ROOM_BYTES: u64 = 128 << 10;
const DEVICE_BYTES: u64 = 1 << 10;

/// A verb that had begun when the server ended. What it was to change is as before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The verb.
    pub verb: String,
    /// The devices.
    pub names: Vec<String>,
}

/// A change that has begun and is not durable yet.
#[derive(Debug)]
struct Pending {
    verb: String,
    names: Vec<String>,
    /// Lines of a commit that waits for the disk.
    lines: Vec<Line>,
}

impl Pending {
    fn begin(&self, number: u64, synced: u64) -> Line {
        Line::Begin { begin: number, synced, verb: self.verb.clone(), names: self.names.clone() }
    }
}

/// The file and its devices.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    dir: File,
    /// The current file. Shared, so that one thread can sync it while others append.
    file: Arc<File>,
    /// Length of the file. Later bytes are a part of a write that failed.
    bytes: u64,
    /// Bytes that are durable.
    synced: u64,
    /// Bytes reserved on the disk.
    room: u64,
    /// Number of appends, and number of durable ones.
    written: u64,
    durable: u64,
    /// Nobody knows what the file holds.
    is_unknown: bool,
    /// The devices, as of the last durable change.
    topology: Topology,
    /// Number of the next change.
    next: u64,
    pending: BTreeMap<u64, Pending>,
    /// A thread syncs the file.
    pub is_syncing: bool,
}

/// A sync of the file, for a thread that does not hold the lock.
pub struct Sync {
    file: Arc<File>,
    written: u64,
    bytes: u64,
}

impl Sync {
    /// Waits for the disk.
    pub fn run(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl Log {
    /// Opens the file in a directory, or creates it. Returns the changes that had begun and were not
    /// committed.
    ///
    /// # Errors
    /// [`StateError`]: the file is left as it is.
    pub fn open(dir_path: &Path) -> Result<(Self, Vec<Unfinished>), StateError> {
        let of_dir = |error: io::Error| StateError::Directory(dir_path.to_owned(), error);
        let path = dir_path.join(TOPOLOGY);
        let dir = File::open(dir_path).map_err(of_dir)?;
        let (mut file, is_read_only) = open_file(&path).map_err(of_dir)?;
        let mut content = Vec::new();
        (&mut file).take(MAX_BYTES + 1).read_to_end(&mut content).map_err(of_dir)?;
        if content.len() as u64 > MAX_BYTES {
            return Err(StateError::Foreign(path));
        }
        let (topology, bytes, unfinished, next) = match lines::read(&content) {
            Read::Whole { topology, bytes, unfinished, next } => (topology, bytes, unfinished, next),
            Read::Foreign => return Err(StateError::Foreign(path)),
            Read::Newer(version) => return Err(StateError::Newer(path, version)),
            Read::Damaged(line) => return Err(StateError::Damaged(path, line)),
        };
        let is_cut = bytes < content.len() as u64;
        if is_cut {
            tracing::warn!("{}: a line that was not written to its end is left out", path.display());
        }
        let mut log = Self {
            path,
            dir,
            file: Arc::new(file),
            bytes,
            synced: 0,
            room: 0,
            written: 0,
            durable: 0,
            // Nothing can be appended: the next change replaces the file, or fails.
            is_unknown: is_read_only,
            topology,
            next,
            pending: BTreeMap::new(),
            is_syncing: false,
        };
        // Drops what had begun and was cut off.
        if let Err(error) = log.rewrite() {
            if bytes == 0 {
                return Err(of_dir(error));
            }
            let path = log.path.display();
            if is_read_only {
                tracing::error!("{path}: verbs that change devices fail, and nothing is saved: {error}");
            } else {
                tracing::warn!("{path}: cannot be replaced, and goes on as it is: {error}");
            }
            log.is_unknown |= is_cut && log.file.set_len(bytes).is_err();
            // A server that was killed may not have synced its last line.
            log.is_unknown |= log.file.sync_data().and_then(|()| log.dir.sync_all()).is_err();
        }
        // For the next start. Without it a start on a full disk may fail, and this one goes on.
        let _ = log.reserve(0);
        let unfinished = unfinished.into_iter().map(|(verb, names)| Unfinished { verb, names });
        Ok((log, unfinished.collect()))
    }

    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    // ---- changes --------------------------------------------------------------------------------

    /// Reserves room for a change of `devices` devices, so that a change that has taken effect can be committed.
    pub fn reserve(&mut self, devices: usize) -> io::Result<()> {
        self.settle()?;
        let wanted = self.bytes + ROOM_BYTES + devices as u64 * DEVICE_BYTES;
        if self.room >= self.bytes + wanted {
            return Ok(());
        }
        // With room for the changes that come next, if there is any.
        for bytes in [wanted + ROOM_BYTES, wanted] {
            match fallocate(&*self.file, FallocateFlags::KEEP_SIZE, self.bytes, bytes) {
                Ok(()) => {
                    self.room = self.bytes + bytes;
                    return Ok(());
                }
                // Not all file systems can.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
                Err(Errno::NOSPC | Errno::DQUOT) if bytes > wanted => {}
                Err(error) => return Err(error.into()),
            }
        }
        unreachable!("the last size returns")
    }

    /// Begins a change. Returns its number.
    pub fn begin(&mut self, verb: &str, names: Vec<String>) -> io::Result<u64> {
        let number = self.next;
        self.next += 1;
        let pending = Pending { verb: verb.to_owned(), names, lines: Vec::new() };
        let line = pending.begin(number, self.synced);
        self.pending.insert(number, pending);
        self.append(&[line]).inspect_err(|_| drop(self.pending.remove(&number)))?;
        Ok(number)
    }

    /// Writes the end of a change. [`apply`](Self::apply) follows once the end is durable.
    pub fn end(&mut self, number: u64, lines: &[Line]) -> io::Result<()> {
        let Some(pending) = self.pending.get_mut(&number) else { return Ok(()) };
        pending.lines = lines.to_vec();
        self.append(lines).inspect_err(|_| {
            if !self.is_unknown
                && let Some(pending) = self.pending.get_mut(&number)
            {
                // Nothing of it is in the file.
                pending.lines.clear();
            }
        })
    }

    /// Applies a change whose end is durable.
    pub fn apply(&mut self, number: u64) {
        for line in self.pending.remove(&number).into_iter().flat_map(|pending| pending.lines) {
            match line {
                Line::Put { device, .. } => self.topology.put(device),
                Line::Gone { name, .. } => self.topology.remove(&name),
                Line::Format { .. } | Line::Begin { .. } | Line::End { .. } => {}
            }
        }
    }

    /// Drops a change that is not made, or whose end could not be written, from the next file.
    pub fn give_up(&mut self, number: u64) {
        let Some(pending) = self.pending.remove(&number) else { return };
        if pending.lines.is_empty() && !self.is_unknown {
            // An end without a change, which needs not be durable.
            let _ = self.append(&[Line::End { end: number }]);
        } else {
            // The lines may be in the file.
            self.is_unknown = true;
        }
    }

    /// Appends lines of a pending change, all or none. If that is not possible the file is replaced, which
    /// has them, too.
    fn append(&mut self, lines: &[Line]) -> io::Result<()> {
        if self.is_unknown {
            return self.rewrite();
        }
        let text = Line::text(lines);
        if let Err(error) = (&*self.file).write_all(text.as_bytes()) {
            // A part may be there.
            self.is_unknown = self.file.set_len(self.bytes).is_err();
            self.room = 0;
            return self.rewrite().map_err(|_| error);
        }
        self.bytes += text.len() as u64;
        self.written += 1;
        Ok(())
    }

    // ---- durability -----------------------------------------------------------------------------

    /// Returns the number of appends so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    pub fn is_durable(&self, written: u64) -> bool {
        self.durable >= written
    }

    /// Replaces an unknown file. Returns false if the file is known.
    pub fn settle(&mut self) -> io::Result<bool> {
        if self.is_unknown { self.rewrite().map(|()| true) } else { Ok(false) }
    }

    pub fn sync(&self) -> Sync {
        Sync { file: Arc::clone(&self.file), written: self.written, bytes: self.bytes }
    }

    /// Notes the result of a sync. The result for a file that was replaced meanwhile is ignored.
    pub fn synced(&mut self, sync: &Sync, done: io::Result<()>) {
        if !Arc::ptr_eq(&sync.file, &self.file) {
            return;
        }
        match done {
            Ok(()) => (self.synced, self.durable) = (sync.bytes, sync.written),
            Err(error) => {
                tracing::warn!("{}: a write failed, the file is replaced: {error}", self.path.display());
                // The kernel forgets what it could not write.
                self.is_unknown = true;
            }
        }
    }

    /// Replaces the file if most of it is past. A failure is tried again with the next change.
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
            tracing::warn!("{}: cannot be replaced by a smaller file: {error}", self.path.display());
        }
    }

    /// Replaces the file by one with the devices and all pending changes. The new file is durable when this
    /// returns.
    ///
    /// # Errors
    /// Before the rename the old file stays the current one; after it the file is unknown.
    fn rewrite(&mut self) -> io::Result<()> {
        if self.is_unknown && mutants::on(Mutant::StateGivesUp) {
            return Err(io::Error::other("an earlier write has failed"));
        }
        let text = self.text();
        let new = self.path.with_file_name(NEW);
        // Else a part of a file would take the last of the room.
        let remove = |_: &io::Error| _ = fs::remove_file(&new);
        let file = create(&new, text.as_bytes()).inspect_err(remove)?;
        if let Err(error) = fs::rename(&new, &self.path) {
            match is_at(&file, &self.path) {
                // Done, whatever was reported.
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
        (self.file, self.bytes, self.synced, self.room) = (Arc::new(file), text.len() as u64, 0, 0);
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

/// Opens a file for appending, or creates it. Returns the file and whether it can only be read, because its
/// file system is read-only.
pub fn open_file(path: &Path) -> io::Result<(File, bool)> {
    match OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path) {
        Ok(file) => Ok((file, false)),
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => match File::open(path) {
            Ok(file) => Ok((file, true)),
            // The file cannot be created.
            Err(_) => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// Creates a file with this content, and makes that durable.
fn create(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().append(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_len(0)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(file)
}

/// Returns true if a path names this file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (file, at) = (file.metadata()?, fs::symlink_metadata(path)?);
    Ok((file.dev(), file.ino()) == (at.dev(), at.ino()))
}

#[cfg(test)]
impl Log {
    /// Exchanges the file.
    pub fn exchange_file(&mut self, file: File) -> Arc<File> {
        self.room = u64::MAX;
        std::mem::replace(&mut self.file, Arc::new(file))
    }

    /// Exchanges the directory.
    pub fn exchange_dir(&mut self, dir: File) -> File {
        std::mem::replace(&mut self.dir, dir)
    }
}
