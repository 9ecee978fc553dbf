//! Resource limits: a case makes every call fail that needs more of a resource than remains.
//!
//! In such a case the object is the name of the limit, and the ordinal is the remaining amount: `limit nofile 3`.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use freestone_testkit::Rng;
use libc::pid_t;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tempfile::NamedTempFile;

use super::fault::{Case, End, Extent, FailureMode, Site};
use super::hash;

/// Name in place of a kind of call, in cases that impose a limit.
pub const LIMIT: &str = "limit";
/// Name of the file that fills a disk, beside the directory of a run.
const FILLER: &str = "filler";
const KIB: u64 = 1024;

/// A limit, and the amounts of it that are tried.
struct Limit {
    name: &'static str,
    kind: LimitKind,
    errno: i32,
    /// Remaining amounts to try: descriptors, KiB or calls.
    left: &'static [u32],
}

const LIMITS: &[Limit] = &[
    Limit {
        name: "nofile",
        kind: LimitKind::Descriptors,
        errno: libc::EMFILE,
        left: &[0, 1, 2, 4, 8, 16, 32],
    },
    Limit { name: "fsize", kind: LimitKind::FileSize, errno: libc::EFBIG, left: &[0, 1, 8, 64, 512] },
    Limit { name: "room", kind: LimitKind::Room, errno: libc::ENOSPC, left: &[0, 4, 64, 512] },
    Limit { name: "changes", kind: LimitKind::Changes, errno: libc::EROFS, left: &[0, 1, 4, 16, 64, 256] },
    Limit { name: "log", kind: LimitKind::Log, errno: libc::EAGAIN, left: &[0] },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// Number of open descriptors (`RLIMIT_NOFILE`).
    Descriptors,
    /// Size of a file in KiB (`RLIMIT_FSIZE`).
    FileSize,
    /// Free space on the disk in KiB.
    Room,
    /// Number of calls that change files, after which the file system is read-only.
    Changes,
    /// Standard error, which is a pipe that is never read.
    Log,
}

/// Returns the limit that a case imposes, or `None` if a single call fails.
pub fn limit_of(case: Option<&Case>) -> Option<LimitKind> {
    let site = &case.filter(|case| case.site.call == LIMIT)?.site;
    LIMITS.iter().find(|limit| limit.name == site.object).map(|limit| limit.kind)
}

/// Returns the number of changes after which the file system is read-only. `None` if the case does not limit changes.
pub fn changes_left(case: &Case) -> Option<u32> {
    (limit_of(Some(case)) == Some(LimitKind::Changes)).then_some(case.site.nth)
}

/// Returns a case for each limit and remaining amount. How long a limit lasts and how the server ends is drawn.
pub fn cases(scene: &str, seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for limit in LIMITS {
        for &left in limit.left {
            let site = Site { call: LIMIT.to_owned(), object: limit.name.to_owned(), nth: left };
            let mut rng = Rng::new(hash(&(seed, scene, &site)));
            let extent = if rng.chance(50) { Extent::Script } else { Extent::Ever };
            let end = if rng.chance(50) { End::Terminated } else { End::Killed };
            cases.push(Case {
                scene: scene.to_owned(),
                site,
                how: FailureMode::Fails(limit.errno),
                extent,
                end,
            });
        }
    }
    cases
}

/// A limit imposed on a server. Dropping this value lifts the limit.
#[derive(Debug)]
pub struct ImposedLimit {
    pid: Option<Pid>,
    resource: Option<(Resource, Rlimit)>,
    filler: Option<PathBuf>,
}

impl ImposedLimit {
    /// Imposes the limit of a case. `dir` is the directory of the run.
    pub fn new(pid: pid_t, dir: &Path, case: &Case) -> io::Result<Self> {
        let mut imposed = Self { pid: Pid::from_raw(pid), resource: None, filler: None };
        let left = u64::from(case.site.nth);
        match limit_of(Some(case)) {
            Some(LimitKind::Descriptors) => imposed.set(Resource::Nofile, first_beyond(pid, left)?)?,
            Some(LimitKind::FileSize) => imposed.set(Resource::Fsize, left * KIB)?,
            Some(LimitKind::Room) => imposed.fill(dir, left * KIB)?,
            // The tracer counts changes, and the log pipe is never read, so nothing needs to be set.
            Some(LimitKind::Changes | LimitKind::Log) | None => {}
        }
        Ok(imposed)
    }

    fn set(&mut self, resource: Resource, most: u64) -> io::Result<()> {
        // Set the hard limit as well, since the server raises its soft limit to the hard limit.
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        self.resource = Some((resource, prlimit(self.pid, resource, limit)?));
        Ok(())
    }

    fn fill(&mut self, dir: &Path, left: u64) -> io::Result<()> {
        let path = dir.with_file_name(FILLER);
        let file = File::create(&path)?;
        self.filler = Some(path);
        let stat = statvfs(dir)?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        fallocate(&file, FallocateFlags::empty(), 0, free.saturating_sub(left).max(1))?;
        Ok(())
    }
}

impl Drop for ImposedLimit {
    fn drop(&mut self) {
        if let Some((resource, before)) = self.resource.take() {
            // An error only means that the server has ended.
            let _ = prlimit(self.pid, resource, before);
        }
        if let Some(filler) = self.filler.take() {
            // If the removal fails, later runs have no space and fail.
            let _ = fs::remove_file(filler);
        }
    }
}

/// Returns the descriptor limit with which a process can open `left` more descriptors. The kernel assigns the lowest
/// free numbers.
fn first_beyond(pid: pid_t, left: u64) -> io::Result<u64> {
    let used: Vec<u64> = fs::read_dir(format!("/proc/{pid}/fd"))?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let mut free = (0..).filter(|number| !used.contains(number));
    Ok(free.nth(left as usize).unwrap_or(u64::MAX))
}

/// A file system (tmpfs) for runs that fill the disk.
pub struct Disk {
    at: PathBuf,
    /// Log of the servers. The log is on another disk, so that it can be written while this one is full.
    log: NamedTempFile,
}

impl Disk {
    /// Mounts the file system at a directory. Requires root.
    pub fn mount(at: &Path) -> Result<Self, String> {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64m", "freestone-torture"])
            .arg(at)
            .status();
        match mount {
            Ok(status) if status.success() => {
                let log = NamedTempFile::new().map_err(|error| error.to_string())?;
                Ok(Self { at: at.to_owned(), log })
            }
            outcome => Err(format!("{}: mount: {outcome:?}", at.display())),
        }
    }
}

impl Disk {
    /// Empties the log and creates a symbolic link to it at this path.
    pub fn begin_log(&self, path: &Path) -> io::Result<()> {
        self.log.as_file().set_len(0)?;
        symlink(self.log.path(), path)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Unmount lazily: a killed server may use the disk for a moment longer.
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}
