//! Directories of a run and of its servers, for images, overlays and sockets. The directories are
//! removed when the run ends, also by a signal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::data::Data;

/// Base of the exit status after a signal: as in a shell, the status is this plus the number of the signal.
const SIGNALLED: i32 = 128;
/// Time for which an interrupted run tries to remove its directory.
const REMOVAL: Duration = Duration::from_secs(5);
/// Prefix of the names of servers' directories.
const OWN_PREFIX: &str = "server-";

/// Directory of a run, removed on drop and when the run is interrupted.
pub struct RunDir(TempDir);

/// Directory of a server, removed on drop.
pub struct ServerDir {
    dir: TempDir,
    /// Open directory, for short socket paths: the directory's own path may be too long.
    open: File,
}

impl ServerDir {
    pub fn image(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a short path of a socket in the directory. Processes of this user can use it while
    /// this value lives.
    pub fn socket(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("{}{name}", fd_path(&self.open)))
    }

    /// Returns the command of a server whose sockets `nbd` and `control` are in the directory. The default control
    /// socket may be in use by the user's own server.
    pub fn serve(&self, freestone: &Path, devices: impl IntoIterator<Item: AsRef<OsStr>>) -> Command {
        let mut command = Command::new(freestone);
        command.arg("serve").args(devices);
        command.arg(format!("--nbd=unix:{}", self.socket("nbd").display()));
        command.arg("--control").arg(self.socket("control"));
        command
    }
}

/// Returns a path under which other processes can reach a file that this process has open.
pub fn fd_path(file: &File) -> String {
    format!("/proc/{}/fd/{}/", std::process::id(), file.as_raw_fd())
}

impl RunDir {
    /// Creates a run's directory with a name that starts with `prefix`.
    pub fn new(data_dir: &Path, prefix: &str) -> Result<Self> {
        let context = || format!("{}", data_dir.display());
        std::fs::create_dir_all(data_dir).with_context(context)?;
        // Servers are started with paths in this directory, which must be absolute.
        let data_dir = data_dir.canonicalize().with_context(context)?;
        let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(&data_dir);
        let run_dir = Self(dir.with_context(context)?);
        run_dir.remove_on_signal()?;
        Ok(run_dir)
    }

    /// Starts a thread that, on a signal, removes the directory and exits the process. The kernel then ends the
    /// servers.
    fn remove_on_signal(&self) -> Result<()> {
        let dir = self.0.path().to_owned();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        std::thread::Builder::new().name("interrupted".into()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                remove(&dir);
                std::process::exit(SIGNALLED + signal);
            }
        })?;
        Ok(())
    }

    /// Creates a file with the first `bytes` bytes of the data, and returns its path.
    pub fn image(&self, data: &Data, bytes: u64) -> Result<PathBuf> {
        let path = self.0.path().join("data.img");
        let context = || format!("{}", path.display());
        let file = File::create(&path).with_context(context)?;
        data.save(&path)?;
        file.set_len(bytes).with_context(context)?;
        Ok(path)
    }

    pub fn server(&self) -> Result<ServerDir> {
        let dir = tempfile::Builder::new().prefix(OWN_PREFIX).tempdir_in(self.0.path())?;
        Ok(ServerDir { open: File::open(dir.path())?, dir })
    }

    /// Removes the directories of the run and of a server from a text.
    pub fn shown(&self, text: &str, server_dir: &ServerDir) -> String {
        strip_dirs(text, self.0.path()).replace(&fd_path(&server_dir.open), "")
    }
}

/// Removes a directory in which the run and its servers may still create files. A file created in
/// the meantime makes the removal fail, so the removal is repeated. Nothing can be created in a
/// removed directory.
fn remove(dir: &Path) {
    let started = Instant::now();
    while let Err(error) = std::fs::remove_dir_all(dir) {
        if error.kind() == ErrorKind::NotFound && !dir.exists() {
            return;
        }
        if started.elapsed() > REMOVAL {
            eprintln!("cannot remove {}: {error}", dir.display());
            return;
        }
    }
}

/// Removes a directory from a text, and the names of server directories in it, which mean nothing
/// to a reader.
fn strip_dirs(text: &str, dir: &Path) -> String {
    let mut shown = String::new();
    let dir = format!("{}/", dir.display());
    let mut parts = text.split(dir.as_str());
    shown.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let name = if part.starts_with(OWN_PREFIX) { part.find(['/', ' ']).unwrap_or(part.len()) } else { 0 };
        let rest = &part[name..];
        let inside = rest.strip_prefix('/').filter(|_| name > 0);
        shown.push_str(if name > 0 && inside.is_none() { "." } else { "" });
        shown.push_str(inside.unwrap_or(rest));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses a file system in memory if possible: each round makes and removes hundreds of files, which takes seconds on
    /// a busy disk.
    #[test]
    fn directory_is_removed_while_files_are_created() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let run_dir = dir.path().join("place");
        for _ in 0..10 {
            std::fs::create_dir(&run_dir).unwrap();
            std::thread::scope(|scope| {
                // Like the run itself: create a server's directory and a file in it, as long as
                // that succeeds.
                scope.spawn(|| {
                    for n in 0..200 {
                        let server_dir = run_dir.join(n.to_string());
                        if std::fs::create_dir(&server_dir).is_err() {
                            break;
                        }
                        let _ = std::fs::write(server_dir.join("overlay"), "");
                    }
                });
                while !run_dir.join("20").exists() {
                    std::thread::yield_now();
                }
                remove(&run_dir);
            });
            assert!(!run_dir.exists());
        }
    }

    #[test]
    fn command_is_shown_without_directories_of_run() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::new(dir.path(), "place-").unwrap();
        let server_dir = run_dir.server().unwrap();
        let text = format!(
            "TMPDIR={} x --unix={} {} base={},readonly",
            server_dir.path().display(),
            server_dir.socket("nbd").display(),
            server_dir.image("overlay.qcow2").display(),
            run_dir.0.path().join("data.img").display()
        );
        assert_eq!(
            run_dir.shown(&text, &server_dir),
            "TMPDIR=. x --unix=nbd overlay.qcow2 base=data.img,readonly"
        );
        std::fs::write(server_dir.socket("here"), "").unwrap();
        assert!(server_dir.image("here").exists());
        drop(server_dir);
        drop(run_dir);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
