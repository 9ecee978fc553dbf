//! Mounts of the workers' disks, by the code of `freestone mount`.
//!
//! Mounts need a server with a control socket. The server here has a device for each worker, over the worker's NBD
//! export.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use freestone_server::{Server, settings::paths};

use crate::mounts::mount::{MountRequest, mount};
use crate::mounts::record::{LockedRecord, Record, Records};
use crate::mounts::umount::release;

/// Longest time to retry an unmount. A mount namespace that another program creates during a check has copies of the
/// mounts, which stay in use until the program ends or removes them.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Pause between two retries.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Type of a file system to mount; `None` if mount(8) finds it.
#[derive(Debug, Clone, Copy)]
pub struct FileSystem<'a>(pub Option<&'a str>);

/// A server with the disks of all workers.
pub struct MountServer {
    /// Ends when dropped.
    _server: Server,
    control: PathBuf,
    dir: PathBuf,
}

/// A mounted disk. Dropping it unmounts the file system, and logs an error.
pub struct Mounted {
    locked: Option<LockedRecord>,
    /// Mount point.
    pub dir: PathBuf,
}

/// Name of a worker's device.
fn device(worker: usize) -> String {
    format!("explore-{worker}")
}

impl MountServer {
    /// Starts a server for disks with these NBD URIs. Sockets and mount points lie in `dir`.
    pub fn start(dir: &Path, uris: &[String]) -> Result<Self> {
        let dir = dir.join("mounts");
        fs::create_dir(&dir).with_context(|| format!("{}: cannot create the directory", dir.display()))?;
        let control = dir.join(paths::CONTROL_SOCKET);
        let mut builder = Server::builder().control(&control);
        for (index, uri) in uris.iter().enumerate() {
            builder = builder.device(format!("{}=nbd,uri={}", device(index), uri.replace(',', ",,")));
        }
        Ok(Self { _server: builder.start()?, control, dir })
    }

    /// Mounts the disk of a worker.
    pub fn mount(&self, worker: usize, fs: FileSystem<'_>) -> Result<Mounted> {
        Mounted::new(&device(worker), &self.dir.join(format!("dir-{worker}")), &self.control, fs)
    }
}

impl Mounted {
    /// Mounts a device of the server at `control` at the directory `dir`, which is created.
    pub fn new(name: &str, dir: &Path, control: &Path, fs: FileSystem<'_>) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("{}: cannot create the directory", dir.display()))?;
        // All states have the UUID of the base, and XFS refuses a second one at the same time.
        let options = (fs.0 == Some("xfs")).then_some("nouuid");
        let request = MountRequest { name, dir, via: None, fs: fs.0, options };
        Ok(Self { locked: Some(mount(&request, control)?), dir: dir.into() })
    }

    /// Unmounts the file system, which writes all its data to the disk.
    pub fn unmount(mut self) -> Result<()> {
        let until = Instant::now() + RETRY_MAX;
        while let Some(locked) = self.locked.take() {
            let dir = locked.record.dir.clone();
            match release(locked, false) {
                Err(_) if Instant::now() < until => {
                    sleep(RETRY_PAUSE);
                    self.locked = Records::locate().lock(|record| record.dir == dir)?;
                }
                result => return result,
            }
        }
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(locked) = self.locked.take()
            && let Err(error) = release(locked, true)
        {
            tracing::warn!("{}: cannot be unmounted: {error:#}", self.dir.display());
        }
    }
}

/// Undoes the mounts of explorations that were killed. Logs errors, because they do not concern this exploration.
pub fn release_abandoned() {
    let records = Records::locate();
    let all = records.all().unwrap_or_else(|error| {
        tracing::warn!("mounts of killed explorations are not removed: {error:#}");
        Vec::new()
    });
    for record in all.into_iter().filter(is_abandoned) {
        let locked = records.lock(|other| other.dir == record.dir && is_abandoned(other));
        if let Err(error) = locked.and_then(|locked| locked.map_or(Ok(()), |locked| release(locked, true))) {
            tracing::warn!("{}: mount of a killed exploration: {error:#}", record.dir.display());
        }
    }
}

/// Returns true for a mount of an exploration whose process has ended. Only explorations have their mount points beside
/// their control socket.
fn is_abandoned(record: &Record) -> bool {
    let is_own = record.dir.parent() == record.control.parent();
    is_own && record.server.is_some_and(|server| !server.exists())
}
