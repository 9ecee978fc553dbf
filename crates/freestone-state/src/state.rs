//! The state directory of a server (`serve --state DIR`).

use std::fs::{DirBuilder, File, remove_dir};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone_core::sync::{Condvar, Instant, Mutex, MutexGuard, thread};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::StateError;
use crate::lines::Line;
use crate::log::{InterruptedVerb, Log, TOPOLOGY_FILE, open_file};
use crate::topology::{Device, Topology};

const LOCK_FILE: &str = "lock";
/// Pause between attempts to lock the state directory.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// State of a server. The state directory is locked while this value exists, unless [`release`](State::release) is
/// called before.
///
/// Locking: `log` is locked while lines are written and while the file is replaced, but not during
/// a sync. One thread syncs the lines of all threads; the others wait on `synced`.
#[derive(Debug)]
pub struct State {
    dir: PathBuf,
    log: Mutex<Log>,
    synced: Condvar,
    lock: File,
}

/// A change that has begun. Dropping the change without [`commit`](Self::commit) rolls it back.
#[derive(Debug)]
pub struct Change<'a> {
    state: &'a State,
    number: u64,
    lines: Vec<Line>,
}

impl State {
    /// Opens or creates the state in a directory. Also returns the changes that were not committed.
    ///
    /// An intact topology file that cannot be replaced (full disk, read-only file system) remains
    /// in use. Changes fail until the file can be replaced.
    ///
    /// # Errors
    /// Fails with a [`StateError`]; the state is then unchanged.
    pub fn open(dir: &Path) -> Result<(Self, Vec<InterruptedVerb>), StateError> {
        let directory_error = |error: io::Error| StateError::Directory(dir.to_owned(), error);
        create(dir).map_err(directory_error)?;
        let (lock, _) = open_file(&dir.join(LOCK_FILE)).map_err(directory_error)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StateError::InUse(dir.to_owned())),
            Err(error) => return Err(directory_error(error.into())),
        }
        let (log, interrupted) = Log::open(dir)?;
        let state = Self { dir: dir.to_owned(), log: Mutex::new(log), synced: Condvar::new(), lock };
        Ok((state, interrupted))
    }

    /// Waits until no server uses the state in a directory, at most for `longest`: a server that was killed uses it
    /// until the kernel has freed its memory.
    pub fn wait_until_free(dir: &Path, longest: Duration) {
        let Ok(lock) = File::open(dir.join(LOCK_FILE)) else { return };
        let end = Instant::now() + longest;
        while flock(&lock, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
            && Instant::now() < end
        {
            thread::sleep(LOCK_PAUSE);
        }
    }

    /// Returns the path of the state directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the devices as of the last committed change.
    pub fn topology(&self) -> Topology {
        self.log.lock().topology().clone()
    }

    /// Returns the device with the name `name`; `None` if there is none.
    pub fn find(&self, name: &str) -> Option<Device> {
        self.log.lock().topology().find(name).cloned()
    }

    /// Begins a change of these devices by a verb. The begin is durable on return.
    ///
    /// # Errors
    /// [`StateError::Write`]: the begin may not be durable, so the caller must not make the change.
    pub fn begin(&self, verb: &str, names: &[&str]) -> Result<Change<'_>, StateError> {
        freestone_core::trail::step!();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut log = self.log.lock();
        log.reserve(names.len()).map_err(|error| self.write_error(error))?;
        let number = log.begin(verb, names).map_err(|error| self.write_error(error))?;
        let (log, done) = self.wait_durable(log);
        drop(log);
        let change = Change { state: self, number, lines: Vec::new() };
        done?;
        Ok(change)
    }

    /// Commits devices in one step. The disk space already reserved is enough for one record of
    /// each device.
    ///
    /// # Errors
    /// [`StateError::Write`]: the devices may or may not be recorded at the next start.
    pub fn put(&self, verb: &str, devices: Vec<Device>) -> Result<(), StateError> {
        let mut log = self.log.lock();
        let names = devices.iter().map(|device| device.name.clone()).collect();
        let number = log.begin(verb, names).map_err(|error| self.write_error(error))?;
        drop(log);
        let mut change = Change { state: self, number, lines: Vec::new() };
        for device in devices {
            change.put(device);
        }
        change.commit()?;
        // Reserve space for the next call. If that fails, the present change has still succeeded.
        let _ = self.log.lock().reserve(0);
        Ok(())
    }

    /// Releases the state directory at the end of a server, so that another server can use the directory even if a
    /// thread of this one still holds the state. Later changes fail.
    pub fn release(&self) {
        self.log.lock().release();
        // An unlock of a locked file cannot fail. Otherwise the lock would end with the last reference.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }

    fn write_error(&self, error: io::Error) -> StateError {
        StateError::Write(self.dir.join(TOPOLOGY_FILE), error)
    }

    /// Waits until all lines written so far are durable. If a sync fails, rewrites the file.
    fn wait_durable<'a>(
        &'a self,
        mut log: MutexGuard<'a, Log>,
    ) -> (MutexGuard<'a, Log>, Result<(), StateError>) {
        let written = log.written();
        while !log.is_durable(written) {
            match log.repair() {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => return (log, Err(self.write_error(error))),
            }
            if log.is_syncing {
                log = self.synced.wait(log);
                continue;
            }
            log.is_syncing = true;
            let sync = log.sync();
            drop(log);
            let done = sync.run();
            log = self.log.lock();
            log.is_syncing = false;
            log.record_sync(&sync, done);
            self.synced.notify_all();
        }
        (log, Ok(()))
    }
}

impl Change<'_> {
    /// Records a device that the change creates or modifies.
    pub fn put(&mut self, device: Device) {
        self.lines.push(Line::Put { put: self.number, device });
    }

    /// Records that the change removes a device.
    pub fn remove(&mut self, name: &str) {
        self.lines.push(Line::Gone { gone: self.number, name: name.to_owned() });
    }

    /// Commits the change after it has taken effect. The commit is durable on return.
    ///
    /// # Errors
    /// [`StateError::Write`]: the next start may or may not find the change. If a later change
    /// succeeds, the next start does not find this one.
    pub fn commit(mut self) -> Result<(), StateError> {
        let (state, number) = (self.state, self.number);
        let mut lines = std::mem::take(&mut self.lines);
        lines.push(Line::End { end: number });
        let mut log = state.log.lock();
        let (mut log, done) = match log.commit(number, &lines) {
            Ok(()) => state.wait_durable(log),
            Err(error) => (log, Err(state.write_error(error))),
        };
        match done {
            Ok(()) => {
                log.apply(number);
                log.shrink();
            }
            // Drop the change under the same lock as the failure: no file written from now on
            // contains it.
            Err(_) => log.drop_change(number),
        }
        done
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // After a commit the change is no longer pending, so this has no effect.
        self.state.log.lock().drop_change(self.number);
    }
}

/// Creates a directory if it does not exist, and makes its name durable.
fn create(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        created => created?,
    }
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).inspect_err(|_| {
        // Without a durable name the next start must create the directory again.
        let _ = remove_dir(dir);
    })
}

#[cfg(test)]
mod tests;
