//! A worker's disk as a file, by one nbdfuse for all states.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, Signal, kill_process};

use crate::mounts::helper::{STEP_MAX, command, one_line, wait_until};

/// Longest wait for nbdfuse to end after SIGTERM.
const END_MAX: Duration = Duration::from_secs(5);
const FILE: &str = "disk";

/// A running nbdfuse. Dropping it unmounts the file.
pub struct FuseFile {
    dir: PathBuf,
    child: Child,
}

impl FuseFile {
    /// Starts nbdfuse for an NBD export, with its mount point at `dir`, which is created.
    pub fn start(dir: &Path, uri: &str) -> Result<Self> {
        fs::create_dir(dir).with_context(|| format!("{}: cannot create the directory", dir.display()))?;
        let (ready, log) = (dir.with_extension("pid"), dir.with_extension("log"));
        let stderr = File::create(&log).with_context(|| format!("{}: cannot be written", log.display()))?;
        let mut nbdfuse =
            command("nbdfuse").context("the path of a disk needs nbdfuse (Debian package libnbd-bin)")?;
        // A process group of its own keeps an interrupt of the terminal away from nbdfuse.
        nbdfuse.stdout(Stdio::null()).stderr(stderr).process_group(0);
        let child = nbdfuse.arg("-P").arg(&ready).arg(dir.join(FILE)).arg(uri).spawn();
        let mut this = Self { dir: dir.into(), child: child.context("cannot start nbdfuse")? };
        let mut ended = None;
        let in_time = wait_until(STEP_MAX, || {
            ended = this.child.try_wait().ok().flatten();
            ended.is_some() || fs::metadata(&ready).is_ok_and(|meta| meta.len() > 0)
        });
        match ended {
            Some(status) => {
                let message = one_line(&fs::read_to_string(&log).unwrap_or_default());
                bail!("nbdfuse: {}", if message.is_empty() { status.to_string() } else { message })
            }
            None if !in_time => bail!("nbdfuse does not become ready"),
            None => Ok(this),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        self.dir.join(FILE)
    }

    /// Drops cached content of the file, because the disk under it was switched.
    pub fn forget(&self) -> Result<()> {
        let path = self.path();
        // The kernel drops the page cache of a FUSE file when it is opened; the advice covers a cache that an
        // earlier reader still had open.
        let file =
            File::open(&path).with_context(|| format!("{}: nbdfuse does not respond", path.display()))?;
        fadvise(&file, 0, None, Advice::DontNeed).map_err(io::Error::from).context("cannot drop a page cache")
    }
}

impl Drop for FuseFile {
    fn drop(&mut self) {
        // nbdfuse unmounts at SIGTERM, unless the file is in use.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let is_over = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        if !wait_until(END_MAX, || is_over(&mut self.child)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // After a kill, the mount point is left behind without a process.
        if fs::remove_dir(&self.dir).is_err()
            && let Ok(mut unmount) = command("fusermount3").or_else(|_| command("fusermount"))
        {
            let _ = unmount.args(["-u", "-z"]).arg(&self.dir).stderr(Stdio::null()).status();
        }
    }
}
