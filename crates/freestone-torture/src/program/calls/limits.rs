//! Limits that are reached: not one call fails, but each that needs more than is left.
//!
//! A case names the limit in the place of a call, and what is left in the place of the ordinal: `limit nofile 3`.

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

use super::fault::{Case, End, Extent, How, Site};
use super::hash;

/// In the place of a call's name.
pub const LIMIT: &str = "limit";
/// File that takes the room of a disk, beside the directory of a run.
const FILLER: &str = "filler";
const KIB: u64 = 1024;

/// One limit.
struct Limit {
    name: &'static str,
    reached: Reached,
    /// Error of the calls that need more.
    errno: i32,
    /// What is left: descriptors or KiB.
    left: &'static [u32],
}

const LIMITS: &[Limit] = &[
    Limit {
        name: "nofile",
        reached: Reached::Descriptors,
        errno: libc::EMFILE,
        left: &[0, 1, 2, 4, 8, 16, 32],
    },
    Limit { name: "fsize", reached: Reached::FileSize, errno: libc::EFBIG, left: &[0, 1, 8, 64, 512] },
    Limit { name: "room", reached: Reached::Room, errno: libc::ENOSPC, left: &[0, 4, 64, 512] },
    Limit { name: "log", reached: Reached::Log, errno: libc::EAGAIN, left: &[0] },
];

/// A limit of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// Descriptors (`RLIMIT_NOFILE`).
    Descriptors,
    /// Size of a file (`RLIMIT_FSIZE`).
    FileSize,
    /// Room on the disk.
    Room,
    /// Standard error is a pipe that nobody reads.
    Log,
}

/// Returns the limit of a case.
pub fn of(case: Option<&Case>) -> Option<Reached> {
    let site = &case.filter(|case| case.site.call == LIMIT)?.site;
    LIMITS.iter().find(|limit| limit.name == site.object).map(|limit| limit.reached)
}

/// Returns the cases of a scene. How long a limit lasts and how the server ends is drawn.
pub fn cases(scene: &str, seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for limit in LIMITS {
        for &left in limit.left {
            let site = Site { call: LIMIT.to_owned(), object: limit.name.to_owned(), nth: left };
            let mut rng = Rng::new(hash(&(seed, scene, &site)));
            let extent = if rng.chance(50) { Extent::Script } else { Extent::Ever };
            let end = if rng.chance(50) { End::Told } else { End::Killed };
            cases.push(Case { scene: scene.to_owned(), site, how: How::Fails(limit.errno), extent, end });
        }
    }
    cases
}

/// A limit that a server has; dropping this lifts it.
#[derive(Debug)]
pub struct Imposed {
    pid: Option<Pid>,
    resource: Option<(Resource, Rlimit)>,
    filler: Option<PathBuf>,
}

impl Imposed {
    /// Imposes the limit of a case. `dir` is the directory of the run.
    pub fn new(pid: pid_t, dir: &Path, case: &Case) -> io::Result<Self> {
        let mut imposed = Self { pid: Pid::from_raw(pid), resource: None, filler: None };
        let left = u64::from(case.site.nth);
        match of(Some(case)) {
            Some(Reached::Descriptors) => imposed.set(Resource::Nofile, first_beyond(pid, left)?)?,
            Some(Reached::FileSize) => imposed.set(Resource::Fsize, left * KIB)?,
            Some(Reached::Room) => imposed.fill(dir, left * KIB)?,
            // It has been so from the start.
            Some(Reached::Log) | None => {}
        }
        Ok(imposed)
    }

    fn set(&mut self, resource: Resource, most: u64) -> io::Result<()> {
        // The maximum as well: a server raises what it may have to that.
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

impl Drop for Imposed {
    fn drop(&mut self) {
        if let Some((resource, before)) = self.resource.take() {
            // The server may have ended.
            let _ = prlimit(self.pid, resource, before);
        }
        if let Some(filler) = self.filler.take() {
            // A run that finds no room fails.
            let _ = fs::remove_file(filler);
        }
    }
}

/// Returns the limit with which a process can open so many more descriptors: it is given the lowest free numbers.
fn first_beyond(pid: pid_t, left: u64) -> io::Result<u64> {
    let used: Vec<u64> = fs::read_dir(format!("/proc/{pid}/fd"))?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let mut free = (0..).filter(|number| !used.contains(number));
    Ok(free.nth(left as usize).unwrap_or(u64::MAX))
}

/// A disk of its own for runs whose disk has little room.
pub struct Disk {
    at: PathBuf,
    /// What servers log, on another disk.
    log: NamedTempFile,
}

impl Disk {
    /// Mounts it at a directory. Only root can.
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
    /// Has the log at a path be on the other disk.
    pub fn begin_log(&self, path: &Path) -> io::Result<()> {
        self.log.as_file().set_len(0)?;
        symlink(self.log.path(), path)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A server that was killed may have it open for a moment longer.
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}
