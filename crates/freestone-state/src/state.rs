//! The directory of a server that runs.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;
use thiserror::Error;

use crate::lines::{self, Line, Read};
use crate::topology::{Device, Topology};

const LOCK: &str = "lock";
const TOPOLOGY: &str = "topology";
/// While it is written.
const NEW: &str = "topology.new";
/// A larger file is no list of devices.
const MAX_BYTES: u64 = 1 << 30;
/// The file is written anew where it has so many bytes, and that would make it much smaller.
const REWRITE_BYTES: u64 = 4 << 20;
/// How much smaller.
const REWRITE_PART: u64 = 4;
/// Room that a change has on the disk before it takes effect, and what each of its devices may take.
const ROOM_BYTES: u64 = 128 << 10;
const DEVICE_BYTES: u64 = 1 << 10;

/// Why a state is not to be had, or not kept.
#[derive(Debug, Error)]
pub enum StateError {
    /// The directory is not to be had.
    #[error("{}: cannot be used as the state of a server: {}", .0.display(), .1)]
    Directory(PathBuf, #[source] io::Error),
    /// Another server has it.
    #[error("{}: is the state of another server that runs", .0.display())]
    InUse(PathBuf),
    /// Not of this program.
    #[error("{}: is no state of a server", .0.display())]
    Foreign(PathBuf),
    /// Of a later version of the program.
    #[error("{}: has version {} of the format, and this program knows {} only", .0.display(), .1, lines::VERSION)]
    Newer(PathBuf, u32),
    /// Not what was written.
    #[error("{}: line {} is damaged; the lines before it are whole", .0.display(), .1)]
    Damaged(PathBuf, usize),
    /// What is about to change cannot be kept.
    #[error("{}: cannot be written: {}", .0.display(), .1)]
    Write(PathBuf, #[source] io::Error),
    /// An earlier write is not known to be durable.
    #[error("{}: an earlier change may not be durable; the server keeps no more until its next start", .0.display())]
    Broken(PathBuf),
}

/// A verb that had begun when the server ended. What it was to change is as before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The verb.
    pub verb: String,
    /// The devices.
    pub names: Vec<String>,
}

/// The state of a server, which is kept as long as this lives.
///
/// Lock order: `log`, then `sync`. `log` is locked while lines are written, and while the file is
/// written anew; `sync` for a look or a change, and not while the disk is waited for.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    log: Mutex<Log>,
    sync: Mutex<Sync>,
    synced: Condvar,
    /// Locked.
    _lock: File,
}

/// The file, and what it says.
#[derive(Debug)]
struct Log {
    file: File,
    /// Its length: behind this there is nothing, or what could not be written.
    bytes: u64,
    /// Of these the disk has promised room.
    room: u64,
    topology: Topology,
    next: u64,
    /// Changes that are not committed.
    open: usize,
}

/// How much of the file is durable.
#[derive(Debug)]
struct Sync {
    bytes: u64,
    /// Somebody waits for the disk.
    busy: bool,
    /// The disk has failed: nobody knows what is durable.
    broken: bool,
}

/// A change that has begun. Without [`commit`](Self::commit) it is none.
#[derive(Debug)]
pub struct Change<'a> {
    state: &'a State,
    number: u64,
    lines: Vec<Line>,
    ended: bool,
}

impl State {
    /// Opens the state in a directory, or begins one. Answers what had begun and not ended before.
    ///
    /// # Errors
    /// See [`StateError`]; nothing is changed then.
    pub fn open(dir: &Path) -> Result<(Self, Vec<Unfinished>), StateError> {
        let of_dir = |error: io::Error| StateError::Directory(dir.to_owned(), error);
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(of_dir(error)),
            _ => {}
        }
        let open = |name: &str| {
            OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(dir.join(name))
        };
        let lock = open(LOCK).map_err(of_dir)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StateError::InUse(dir.to_owned())),
            Err(error) => return Err(of_dir(error.into())),
        }
        let path = dir.join(TOPOLOGY);
        let mut file = open(TOPOLOGY).map_err(of_dir)?;
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
        if bytes < content.len() as u64 {
            tracing::warn!("{}: a line that was not written to its end is left out", path.display());
        }
        let log = Log { file, bytes, room: 0, topology, next, open: 0 };
        let sync = Sync { bytes: 0, busy: false, broken: false };
        let state =
            Self { path, log: Mutex::new(log), sync: Mutex::new(sync), synced: Condvar::new(), _lock: lock };
        // Without what had begun and was cut off.
        state.rewrite(&mut state.log()).map_err(of_dir)?;
        let unfinished = unfinished.into_iter().map(|(verb, names)| Unfinished { verb, names });
        Ok((state, unfinished.collect()))
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// The devices, as of the last committed change.
    pub fn topology(&self) -> Topology {
        self.log().topology.clone()
    }

    /// One of them.
    pub fn find(&self, name: &str) -> Option<Device> {
        self.log().topology.find(name).cloned()
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // Lines are written as a whole or taken back.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sync(&self) -> MutexGuard<'_, Sync> {
        // Nothing in here can be half done.
        self.sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A verb is about to change these devices. Durable when this returns.
    ///
    /// # Errors
    /// [`StateError::Write`] or [`StateError::Broken`]: the verb must not take effect.
    pub fn begin(&self, verb: &str, names: &[&str]) -> Result<Change<'_>, StateError> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let synced = self.sync().bytes;
        let mut log = self.log();
        let number = log.next;
        log.make_room(names.len()).map_err(|error| self.write_error(error))?;
        let line = Line::Begin { begin: number, synced, verb: verb.to_owned(), names };
        let end = self.append(&mut log, &[line])?;
        log.next += 1;
        log.open += 1;
        drop(log);
        let change = Change { state: self, number, lines: Vec::new(), ended: false };
        self.wait_durable(end)?;
        Ok(change)
    }

    fn write_error(&self, error: io::Error) -> StateError {
        StateError::Write(self.path.clone(), error)
    }

    /// Writes lines, all or none; where they end.
    fn append(&self, log: &mut Log, lines: &[Line]) -> Result<u64, StateError> {
        if self.sync().broken {
            return Err(StateError::Broken(self.path.clone()));
        }
        let text = Line::text(lines);
        if let Err(error) = log.file.write_all(text.as_bytes()) {
            // A part may be there.
            if log.file.set_len(log.bytes).is_err() {
                self.sync().broken = true;
            }
            log.room = 0;
            return Err(self.write_error(error));
        }
        log.bytes += text.len() as u64;
        Ok(log.bytes)
    }

    /// Waits until so much of the file is durable. One waits for the disk, for all that has come until
    /// then.
    fn wait_durable(&self, end: u64) -> Result<(), StateError> {
        let mut sync = self.sync();
        loop {
            if sync.broken {
                return Err(StateError::Broken(self.path.clone()));
            }
            if sync.bytes >= end {
                return Ok(());
            }
            if sync.busy {
                sync = self.synced.wait(sync).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            sync.busy = true;
            drop(sync);
            let (file, bytes) = {
                let log = self.log();
                (log.file.try_clone(), log.bytes)
            };
            let done = file.and_then(|file| file.sync_data());
            sync = self.sync();
            sync.busy = false;
            match done {
                Ok(()) => sync.bytes = sync.bytes.max(bytes),
                // What the kernel could not write it forgets.
                Err(_) => sync.broken = true,
            }
            self.synced.notify_all();
        }
    }

    /// Writes the file anew, with what is there now.
    fn rewrite(&self, log: &mut Log) -> io::Result<()> {
        let mut all = vec![Line::first()];
        if log.topology.devices().next().is_some() {
            let number = log.next;
            let (verb, names) = ("rewrite".to_owned(), Vec::new());
            all.push(Line::Begin { begin: number, synced: 0, verb, names });
            all.extend(
                log.topology.devices().map(|device| Line::Put { put: number, device: device.clone() }),
            );
            all.push(Line::End { end: number });
            log.next += 1;
        }
        let text = Line::text(&all);
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let new = dir.join(NEW);
        let mut file = OpenOptions::new().append(true).create(true).truncate(false).mode(0o600).open(&new)?;
        file.set_len(0)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &self.path)?;
        File::open(dir)?.sync_all()?;
        (log.file, log.bytes, log.room) = (file, text.len() as u64, 0);
        self.sync().bytes = log.bytes;
        Ok(())
    }
}

impl Log {
    /// Has the disk promise room for a change, so that one that has taken effect can be committed.
    fn make_room(&mut self, devices: usize) -> io::Result<()> {
        let wanted = ROOM_BYTES + devices as u64 * DEVICE_BYTES;
        if self.room >= self.bytes + wanted {
            return Ok(());
        }
        // And as much again for those that come next.
        let bytes = wanted + ROOM_BYTES;
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.bytes, bytes) {
            Ok(()) => {
                self.room = self.bytes + bytes;
                Ok(())
            }
            // Not all file systems can.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Change<'_> {
    /// A device is made, or is otherwise from now on.
    pub fn put(&mut self, device: Device) {
        self.lines.push(Line::Put { put: self.number, device });
    }

    /// A device is gone.
    pub fn gone(&mut self, name: &str) {
        self.lines.push(Line::Gone { gone: self.number, name: name.to_owned() });
    }

    /// It has taken effect. Durable when this returns.
    ///
    /// # Errors
    /// As [`State::begin`]: the change is not there at the next start.
    pub fn commit(mut self) -> Result<(), StateError> {
        let state = self.state;
        let mut lines = std::mem::take(&mut self.lines);
        lines.push(Line::End { end: self.number });
        let mut log = state.log();
        // Whatever comes of it, nothing is to be added.
        self.ended = true;
        let end = state.append(&mut log, &lines)?;
        for line in lines {
            match line {
                Line::Put { device, .. } => log.topology.put(device),
                Line::Gone { name, .. } => log.topology.remove(&name),
                Line::Format { .. } | Line::Begin { .. } | Line::End { .. } => {}
            }
        }
        drop(log);
        let done = state.wait_durable(end);
        // Counts this one down.
        drop(self);
        done?;
        state.rewrite_if_large();
        Ok(())
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut log = self.state.log();
        log.open -= 1;
        if !self.ended {
            // It was given up: an end without a change, which needs not be durable.
            let _ = self.state.append(&mut log, &[Line::End { end: self.number }]);
        }
    }
}

impl State {
    /// Writes the file anew where most of it is past. What fails is tried again with the next change.
    fn rewrite_if_large(&self) {
        let mut log = self.log();
        if log.open > 0 || log.bytes < REWRITE_BYTES {
            return;
        }
        let live: usize =
            log.topology.devices().map(|device| device.words.len() + device.name.len() + 128).sum();
        if log.bytes / REWRITE_PART < live as u64 {
            return;
        }
        if let Err(error) = self.rewrite(&mut log) {
            tracing::warn!("{}: could not be written anew: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests;
