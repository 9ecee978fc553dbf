//! What the machine and this process have and use of memory, from /proc and the control groups.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use freestone::PAGE_BYTES;
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

/// The default `mem_limit` of a RAM disk in bytes: half of the memory, in whole pages, so that two halves are not more
/// than the whole.
pub fn half_of_memory() -> Result<u64> {
    let page = PAGE_BYTES as u64;
    Ok((memory()? / 2 / page).max(1) * page)
}

/// The memory that this process may use, in bytes: the machine's, or the limit of its control group.
pub fn memory() -> Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let total = kib_line(&meminfo, "MemTotal:").context("/proc/meminfo has no MemTotal")?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Ok(total.min(group_limit(&groups, Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX)))
}

/// The lowest memory limit of the process's control group and of the groups around it, versions 1 and 2.
/// `groups` is the text of /proc/self/cgroup.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let mut lowest = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (top, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            list if list.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let group = top.join(path.trim_start_matches('/'));
        // "max" (no limit) does not parse and drops out. In a container the path may lie outside: then only
        // the root is left of it.
        let limits = group.ancestors().take_while(|dir| dir.starts_with(&top)).map(|dir| dir.join(file));
        lowest = limits.filter_map(|f| read_number(&f)).chain(lowest).min();
    }
    lowest
}

fn read_number(file: &PathBuf) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Raises the soft limit of open files to the hard one: a thousand sockets with their clients take more than the usual
/// 1024. Returns the former soft limit, where it was changed.
pub fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    let former = current?;
    if maximum.is_some_and(|most| former >= most) {
        return None;
    }
    // If that is refused, the limit is what it was.
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).ok()?;
    Some(former)
}

/// Memory of this process as the kernel counts it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Resident set.
    pub rss_bytes: u64,
    /// The same with every shared page divided by the number of its users.
    pub pss_bytes: u64,
}

/// Reads `/proc/self/smaps_rollup`.
pub fn process_memory() -> Result<ProcessMemory> {
    let text =
        fs::read_to_string("/proc/self/smaps_rollup").context("cannot read /proc/self/smaps_rollup")?;
    let line = |key| kib_line(&text, key).with_context(|| format!("/proc/self/smaps_rollup has no {key}"));
    Ok(ProcessMemory { rss_bytes: line("Rss:")?, pss_bytes: line("Pss:")? })
}

/// The value of a line `Key:   123 kB`, in bytes.
fn kib_line(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{group_limit, half_of_memory, kib_line, memory, process_memory};

    #[test]
    fn this_machine_answers() {
        let (half, all) = (half_of_memory().unwrap(), memory().unwrap());
        assert!(all > 1 << 20 && half.is_multiple_of(4096) && (half * 2..half * 2 + 8192).contains(&all));
        let process = process_memory().unwrap();
        assert!(process.pss_bytes > 0 && process.rss_bytes >= process.pss_bytes);
        assert_eq!(kib_line("MemFree:  1 kB\nMemTotal:   12 kB\n", "MemTotal:"), Some(12 * 1024));
    }

    #[test]
    fn the_lowest_group_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("a/memory.max", "4096\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "1024\n");
        assert_eq!(group_limit("0::/a/b\n", root.path()), Some(4096));
        assert_eq!(group_limit("0::/a/b\n4:cpu,memory:/c\n3:pids:/a\n", root.path()), Some(1024));
        assert_eq!(group_limit("0::/../elsewhere\n", root.path()), None);
        assert_eq!(group_limit("garbage\n", root.path()), None);
    }
}
