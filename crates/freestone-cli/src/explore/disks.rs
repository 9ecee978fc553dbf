//! The disks of the workers: each is exported over NBD, and switched to a state before its check.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use freestone::device::Device;
use freestone_explore::{SwitchedDisk, Timeline};
use freestone_nbd::{Address, ExportOptions, Limits, Server};
use freestone_server::settings::paths;

use super::fuse::FuseFile;
use super::mounted::MountServer;

/// The exports of all workers. Clients of the server end before the server: fields are dropped in this order.
pub struct Disks {
    /// Mounts the disks, or `None` without `--mount`.
    pub mounts: Option<MountServer>,
    workers: Vec<Worker>,
    server: Server,
    socket: PathBuf,
}

/// Disk of a worker.
struct Worker {
    disk: Arc<SwitchedDisk>,
    /// Name of the export for clients of the check, which are disconnected after it.
    name: String,
    uri: String,
    file: Option<FuseFile>,
}

/// Names of the exports that stay connected between checks.
fn kept_name(worker: usize) -> String {
    format!("kept-{worker}")
}

impl Disks {
    /// Exports a disk for each of `jobs` workers at a socket in `dir`.
    ///
    /// # Errors
    /// Fails if the socket cannot be used, nbdfuse does not start, or the server of the mounts does not start.
    pub fn start(dir: &Path, timeline: &Timeline, jobs: usize, with_file: bool, mount: bool) -> Result<Self> {
        let socket = dir.join(paths::NBD_SOCKET);
        let server = Server::new(Limits::default());
        let address = server.listen(&Address::Unix(socket.clone()))?;
        let mut workers = Vec::new();
        for index in 0..jobs {
            let disk = Arc::new(SwitchedDisk::new(Arc::new(timeline.disk()?)));
            let name = format!("disk-{index}");
            let publish = |name: &str, default| {
                let options = ExportOptions { default, ..ExportOptions::default() };
                server.publish(&address, name, Arc::clone(&disk) as Arc<dyn Device>, options)
            };
            publish(&name, index == 0)?;
            publish(&kept_name(index), false)?;
            let uri = address.uri(&name);
            let kept = address.uri(&kept_name(index));
            let file = with_file
                .then(|| FuseFile::start(&dir.join(format!("file-{index}")), &kept))
                .transpose()
                .context("--file")?;
            workers.push(Worker { disk, name, uri, file });
        }
        let kept: Vec<_> = (0..jobs).map(|index| address.uri(&kept_name(index))).collect();
        let mounts = mount.then(|| MountServer::start(dir, &kept)).transpose().context("--mount")?;
        Ok(Self { mounts, workers, server, socket })
    }

    /// Switches the disk of a worker. Clients of the former state are disconnected first.
    pub fn switch(&self, worker: usize, disk: Arc<dyn Device>) -> Result<()> {
        let Worker { disk: switched, name, file, .. } = &self.workers[worker];
        self.server.cut_connections_during(name, || switched.switch(disk));
        file.as_ref().map_or(Ok(()), FuseFile::forget)
    }

    /// Returns the NBD URI of a worker's disk.
    pub fn uri(&self, worker: usize) -> &str {
        &self.workers[worker].uri
    }

    /// Returns the file in which nbdfuse presents a worker's disk, or `None` without `--file`.
    pub fn file(&self, worker: usize) -> Option<PathBuf> {
        self.workers[worker].file.as_ref().map(FuseFile::path)
    }

    /// Returns the socket of all disks.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
