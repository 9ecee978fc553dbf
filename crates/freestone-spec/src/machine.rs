//! Memory size of the machine and its control groups, and settings of the memory allocator.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use freestone::PAGE_BYTES;
use thiserror::Error;

/// Errors from determining the memory size of the machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The file at this path cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(&'static str, io::Error),
    /// The file at this path does not contain a line with this key.
    #[error("{0} has no {1}")]
    Missing(&'static str, &'static str),
}

/// Returns the default `mem_limit` of a RAM disk in bytes: half of the memory, rounded down to
/// whole pages. So two disks with default limits do not exceed the memory.
pub fn half_of_memory() -> Result<u64, MachineError> {
    let page = PAGE_BYTES as u64;
    Ok((memory()? / 2 / page).max(1) * page)
}

/// Returns the memory that this process may use, in bytes: the memory of the machine, or the limit
/// of its control group if that is smaller.
pub fn memory() -> Result<u64, MachineError> {
    const MEMINFO: &str = "/proc/meminfo";
    let meminfo = fs::read_to_string(MEMINFO).map_err(|error| MachineError::Read(MEMINFO, error))?;
    let total = kib_line(&meminfo, "MemTotal:").ok_or(MachineError::Missing(MEMINFO, "MemTotal"))?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Ok(total.min(group_limit(&groups, Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX)))
}

mod heap {
    #![cfg_attr(target_env = "gnu", expect(unsafe_code))]
    // UNSAFETY: a libc call without a safe wrapper.

    /// Size in bytes from which the allocator uses a separate mapping for an allocation.
    #[cfg(target_env = "gnu")]
    const APART_BYTES: libc::c_int = 64 << 10;

    /// Makes the allocator return large blocks to the system when they are freed. By default the
    /// allocator keeps freed blocks in an arena per CPU. Buffers of past requests would then use
    /// several times as much memory as was ever in use at one time. Must be called before other
    /// threads exist.
    pub fn mmap_large_allocations() {
        #[cfg(target_env = "gnu")]
        // SAFETY: mallopt only changes a setting of the allocator.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, APART_BYTES);
        }
    }

    /// Returns unused memory of the allocator to the system. Takes time in proportion to this
    /// memory, during which allocations of other threads wait.
    pub fn trim_heap() {
        #[cfg(target_env = "gnu")]
        // SAFETY: malloc_trim may be called at any time.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
pub use heap::{mmap_large_allocations, trim_heap};

/// Returns the lowest memory limit in bytes of the process's control group and the ancestors of
/// this group, or `None` without a limit. Supports cgroup versions 1 and 2. `groups` is the text of
/// /proc/self/cgroup.
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
        // The text "max" (unlimited) is not a number and is skipped. In a container the path may be
        // outside of the visible tree. Then only the limit of the root applies.
        let limits = group.ancestors().take_while(|dir| dir.starts_with(&top)).map(|dir| dir.join(file));
        lowest = limits.filter_map(|f| read_number(&f)).chain(lowest).min();
    }
    lowest
}

fn read_number(file: &PathBuf) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the value of a line `Key:   123 kB`, in bytes.
pub fn kib_line(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{group_limit, half_of_memory, kib_line, memory};

    #[test]
    fn memory_of_this_machine_is_known() {
        let (half, all) = (half_of_memory().unwrap(), memory().unwrap());
        assert!(all > 1 << 20 && half.is_multiple_of(4096) && (half * 2..half * 2 + 8192).contains(&all));
        assert_eq!(kib_line("MemFree:  1 kB\nMemTotal:   12 kB\n", "MemTotal:"), Some(12 * 1024));
    }

    #[test]
    fn group_limit_is_the_lowest_of_all_groups() {
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
