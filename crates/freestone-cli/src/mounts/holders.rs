//! Users of a file system that keep it from being unmounted.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, getpid};

use super::attached::loop_devices;
use super::mount_table::MountTable;
use super::processes;

/// Maximum number of holders that an error names.
const NAMED_MAX: usize = 5;

/// Returns a text that names some users of the file system at `dir`: processes with open or mapped files or
/// directories, mounts below `dir`, and loop devices with backing files there.
pub fn describe(dir: &Path) -> String {
    let mut holders: Vec<_> =
        processes::all().filter(|pid| *pid != getpid()).filter_map(|pid| process(pid, dir)).collect();
    if let Ok(table) = MountTable::read() {
        holders.extend(table.below(dir).map(|mount| format!("the mount at {}", mount.dir.display())));
    }
    let loops = loop_devices().filter(|(_, file)| file.starts_with(dir));
    holders.extend(loops.map(|(device, file)| format!("{} (on {})", device.display(), file.display())));
    let rest = holders.len().saturating_sub(NAMED_MAX);
    holders.truncate(NAMED_MAX);
    match (holders.is_empty(), rest) {
        (true, _) => "none that can be seen from here; another mount namespace may have it".to_owned(),
        (false, 0) => holders.join(", "),
        (false, rest) => format!("{} and {rest} more", holders.join(", ")),
    }
}

fn process(pid: Pid, dir: &Path) -> Option<String> {
    let pid = pid.as_raw_nonzero();
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let how = use_of(&proc, dir)?;
    let name = fs::read_to_string(proc.join("comm")).unwrap_or_default();
    Some(format!("{} (pid {pid}, {how})", name.trim_end()))
}

/// Returns how a process uses the file system, or `None` if it does not. Reads links without following them, because
/// access to a file may wait for the disk.
fn use_of(proc: &Path, dir: &Path) -> Option<String> {
    let target_in_dir = |link: PathBuf| fs::read_link(link).ok().filter(|target| target.starts_with(dir));
    let open = || {
        let mut files = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
        files.find_map(|fd| target_in_dir(fd.path()))
    };
    for (link, what) in [("cwd", "its working directory is"), ("root", "its root is"), ("exe", "it runs")] {
        if let Some(target) = target_in_dir(proc.join(link)) {
            return Some(format!("{what} {}", target.display()));
        }
    }
    if let Some(file) = open() {
        return Some(format!("has {} open", file.display()));
    }
    let maps = fs::read_to_string(proc.join("maps")).ok()?;
    let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    mapped.filter(|file| file.starts_with(dir)).map(|file| format!("has {} mapped", file.display())).next()
}
