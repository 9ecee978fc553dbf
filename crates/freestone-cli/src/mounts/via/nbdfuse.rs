//! Attaches a device with nbdfuse(1), which presents it as a file, and a loop device over that file.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::{AttachError, address};
use crate::mounts::helper::{STEP_MAX, command, find, one_line, wait_until};
use crate::mounts::mount_table::MountTable;
use crate::mounts::processes::Process;
use crate::mounts::record::LockedRecord;
use crate::mounts::server::Server;

const PROGRAM: &str = "nbdfuse";
const FUSE: &str = "/dev/fuse";
/// Name of the mount point of nbdfuse, where [`FILE`] presents the device.
const DIR: &str = "fuse";
const FILE: &str = "disk";
/// Name of the PID file that nbdfuse writes once the file [`FILE`] can be used.
const READY: &str = "nbdfuse.pid";
const LOG: &str = "nbdfuse.log";
/// Longest wait for a loop device to close the file after the file system was unmounted.
const CLOSE_MAX: Duration = Duration::from_secs(2);
/// Longest wait for nbdfuse to end after its mount was removed.
const END_MAX: Duration = Duration::from_secs(5);
/// Longest wait for nbdfuse to end if it has nothing to write, or the server hangs.
const SHORT_END_MAX: Duration = Duration::from_millis(500);

/// Returns the path of the file in which nbdfuse presents the device.
pub fn disk(locked: &LockedRecord) -> PathBuf {
    locked.path(DIR).join(FILE)
}

pub fn attach(locked: &mut LockedRecord, server: &mut Server) -> Result<(), AttachError> {
    if find(PROGRAM).is_none() {
        return Err(AttachError::Unavailable("nbdfuse is not installed (Debian package libnbd-bin)".into()));
    }
    if !Path::new(FUSE).exists() {
        return Err(AttachError::Unavailable(format!(
            "there is no {FUSE}: `modprobe fuse` loads the driver"
        )));
    }
    if MountTable::read()?.top_at(&locked.path(DIR)).is_some() {
        if disk(locked).exists() {
            return Ok(());
        }
        // The mount was left by an nbdfuse that was killed.
        detach(locked, false)?;
    }
    let address = address::of_device(locked, server)?;
    locked.record.device = None;
    locked.save()?;
    let (ready, log) = (locked.path(READY), locked.path(LOG));
    match DirBuilder::new().mode(0o700).create(locked.path(DIR)) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(anyhow::Error::from(e).context("cannot create a directory").into());
        }
        _ => {}
    }
    let _ = fs::remove_file(&ready);
    let stderr = File::create(&log).with_context(|| format!("{}: cannot be written", log.display()))?;
    let mut nbdfuse = command(PROGRAM)?;
    // nbdfuse runs in a process group of its own, so that an interrupt from the terminal does not end it.
    nbdfuse.stdout(Stdio::null()).stderr(stderr).process_group(0);
    if locked.record.is_read_only() {
        nbdfuse.arg("-r");
    }
    nbdfuse.arg("-P").arg(&ready).arg(disk(locked)).arg(&address.uri);
    let mut child = nbdfuse.spawn().context("cannot start nbdfuse")?;
    let mut ended = None;
    let in_time = wait_until(STEP_MAX, || {
        ended = child.try_wait().ok().flatten();
        ended.is_some() || fs::metadata(&ready).is_ok_and(|meta| meta.len() > 0)
    });
    if let Some(status) = ended {
        let message = one_line(&fs::read_to_string(&log).unwrap_or_default());
        let message = if message.is_empty() { status.to_string() } else { message };
        return Err(anyhow!("nbdfuse {}: {message}", address.uri).into());
    }
    if !in_time {
        return Err(anyhow!("nbdfuse {}: it does not become ready", address.uri).into());
    }
    // `explore` lives for thousands of mounts, each of which would leave a zombie. Without the thread, only the zombie
    // stays.
    let _ = thread::Builder::new().name("nbdfuse".to_owned()).spawn(move || child.wait());
    Ok(())
}

/// Unmounts the file system of nbdfuse, and waits until nbdfuse has ended. Kills nbdfuse if it does not end
/// by itself.
pub fn detach(locked: &LockedRecord, force: bool) -> Result<()> {
    let disk = disk(locked);
    let was_mounted = unmount_file(&locked.path(DIR), force)?;
    // Without a mount, nbdfuse is just starting or was unmounted by hand, so it has nothing to write.
    let max = if was_mounted && !force { END_MAX } else { SHORT_END_MAX };
    for process in Process::with_word(&disk) {
        if !process.wait(max) {
            process.kill();
            if !process.wait(END_MAX) {
                bail!("nbdfuse of {} does not end", disk.display());
            }
        }
    }
    // nbdfuse may have mounted after the first check.
    unmount_file(&locked.path(DIR), force).map(drop)
}

/// Unmounts the file system of nbdfuse at `dir`. Returns false if it is not mounted.
fn unmount_file(dir: &Path, force: bool) -> Result<bool> {
    if MountTable::read()?.top_at(dir).is_none() {
        return Ok(false);
    }
    let flags = if force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    let mut last = Ok(());
    wait_until(CLOSE_MAX, || {
        last = unmount(dir, flags);
        last != Err(Errno::BUSY)
    });
    match last {
        // EINVAL: nbdfuse has unmounted the file system meanwhile.
        Ok(()) | Err(Errno::INVAL) => Ok(true),
        Err(error) => Err(error).with_context(|| format!("{}: cannot be unmounted", dir.display())),
    }
}
