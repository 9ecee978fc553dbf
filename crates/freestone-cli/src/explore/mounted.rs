//! Mounts of the workers' disks, by the code of `freestone mount`.
//!
//! Mounts need a server with a control socket. The server here has a device for each worker, over the worker's NBD
//! export.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use freestone_server::{Server, settings::paths};

use crate::mounts::mount::{MountRequest, mount};
use crate::mounts::record::LockedRecord;
use crate::mounts::umount::release;

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
        let request = MountRequest { name, dir, via: None, fs: fs.0, options: None };
        Ok(Self { locked: Some(mount(&request, control)?), dir: dir.into() })
    }

    /// Unmounts the file system, which writes all its data to the disk.
    pub fn unmount(mut self) -> Result<()> {
        self.locked.take().map_or(Ok(()), |locked| release(locked, false))
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
