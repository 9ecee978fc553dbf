//! Warnings about device configurations that work, but are probably mistakes. Callers log the
//! warnings when a device is created.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use freestone::ram;

use crate::size::human;

/// Ratio of the size of a RAM disk to the size of its full slot table: 8 bytes per page of 4 KiB.
const DISK_TO_TABLE: u64 = 512;
/// A slot table causes a warning if it can exceed the machine's memory divided by this number.
const MEMORY_TO_TABLE: u64 = 8;
/// A backing device causes a warning if it is smaller than `mem_limit` divided by this number.
const MEMORY_TO_BACKING: u64 = 8;

/// Magic numbers in `statfs` of the file systems that store files in memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Returns warnings if a new RAM disk raises the sum of all memory limits above the machine's
/// `memory`, or if its slot table can grow large. `others` are the memory limits of the existing
/// disks in bytes. A limit of 0 means unlimited and is not counted, because the user requested it
/// explicitly.
pub fn memory_warnings(
    name: &str,
    new: &ram::Config,
    others: impl Iterator<Item = u64>,
    memory: u64,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let before = others.fold(0, u64::saturating_add);
    let sum = before.saturating_add(new.mem_limit);
    // The warning appears only once: for later disks, `before` already exceeds the memory.
    if before <= memory && sum > memory {
        let (sum, memory) = (human(sum), human(memory));
        warnings.push(format!(
            "{name}: the RAM disks, forks and copies may take {sum} together (mem_limit), the machine has {memory}"
        ));
    }
    let table = new.disksize / DISK_TO_TABLE;
    if table > memory / MEMORY_TO_TABLE {
        let (disksize, table, memory) = (human(new.disksize), human(table), human(memory));
        warnings.push(format!(
            "{name}: disksize={disksize}: once it is fully written its table takes {table}, which mem_limit does \
             not bound; the machine has {memory}"
        ));
    }
    warnings
}

/// Location of the backing device of RAM disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingLocation {
    /// True if the backing device is in memory: a file on tmpfs or ramfs, or a device with data in
    /// memory.
    pub in_memory: bool,
    /// Number of free bytes of the file system if the file does not exist yet, else `None`.
    pub free: Option<u64>,
}

impl BackingLocation {
    /// Examines the path of a backing device before it is opened. Errors are ignored, because
    /// opening the device reports them.
    pub fn of(path: &Path) -> Self {
        let found = fs::metadata(path).ok();
        let examined = match (&found, path.parent()) {
            // Device nodes are on a tmpfs, too, but the content of the block device is not in
            // memory.
            (Some(meta), _) if meta.file_type().is_block_device() => return Self::default(),
            (None, Some(dir)) if !dir.as_os_str().is_empty() => dir,
            (None, _) => Path::new("."),
            (Some(_), _) => path,
        };
        let in_memory =
            rustix::fs::statfs(examined).is_ok_and(|s| matches!(s.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC));
        let room = if found.is_none() { rustix::fs::statvfs(examined).ok() } else { None };
        Self { in_memory, free: room.map(|room| room.f_bavail.saturating_mul(room.f_frsize)) }
    }
}

/// Returns warnings if a backing device is unlikely to save memory, or does not fit its file
/// system. `size` is the size of the backing device in bytes.
pub fn backing_warnings(
    name: &str,
    path: &Path,
    size: u64,
    mem_limit: u64,
    location: BackingLocation,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let path = path.display();
    if location.in_memory {
        warnings.push(format!("{name}: backing_dev={path}: is itself in memory, so it saves no memory"));
    }
    if mem_limit == 0 {
        warnings.push(format!(
            "{name}: backing_dev={path}: without mem_limit, pages are written there only by `freestone \
             writeback {name}`"
        ));
    } else if size < mem_limit / MEMORY_TO_BACKING {
        let (size, mem_limit) = (human(size), human(mem_limit));
        warnings.push(format!(
            "{name}: backing_dev={path}: its size of {size} is small compared with mem_limit={mem_limit}"
        ));
    }
    if let Some(free) = location.free.filter(|free| *free < size) {
        let (size, free) = (human(size), human(free));
        warnings.push(format!("{name}: backing_size={size}: the file system of {path} has only {free} free"));
    }
    warnings
}

/// Returns the warning for a device with `record=` but without `power_cut=yes`.
pub fn record_warning(name: &str, log: &Path) -> String {
    let log = log.display();
    format!(
        "{name}: record={log}: without power_cut=yes `freestone power-cut {name} --at` cannot visit points of the log"
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use freestone::ram::Config;

    use super::{BackingLocation, backing_warnings, memory_warnings};

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_limits_above_memory_warn_once() {
        let sum = |sum| {
            format!(
                "r: the RAM disks, forks and copies may take {sum} together (mem_limit), the machine has 8G"
            )
        };
        let table = "r: disksize=513G: once it is fully written its table takes 1G, which mem_limit does not \
                     bound; the machine has 8G";
        for (disksize, mem_limit, others, expected) in [
            (GIB, 4 * GIB, &[4 * GIB][..], vec![]),
            (GIB, 4 * GIB, &[4 * GIB, 1], vec![sum("8G")]),
            (GIB, 5 * GIB, &[4 * GIB, GIB], vec![sum("10G")]),
            // The sum already exceeded the memory before, so the warning is not repeated.
            (GIB, 4 * GIB, &[4 * GIB, 5 * GIB], vec![]),
            // Disks without a limit are not counted.
            (GIB, 0, &[0, 4 * GIB, 4 * GIB], vec![]),
            (GIB, u64::MAX, &[GIB], vec![sum("16777215.9T")]),
            (512 * GIB, GIB, &[], vec![]),
            (513 * GIB, GIB, &[], vec![table.to_owned()]),
            (513 * GIB, 9 * GIB, &[], vec![sum("9G"), table.to_owned()]),
        ] {
            let new = Config { disksize, mem_limit, ..Config::default() };
            assert_eq!(memory_warnings("r", &new, others.iter().copied(), 8 * GIB), expected);
        }
    }

    #[test]
    fn backing_device_without_benefit_warns() {
        let backing = Path::new("/s");
        let tmpfs = "r: backing_dev=/s: is itself in memory, so it saves no memory";
        let unlimited = "r: backing_dev=/s: without mem_limit, pages are written there only by \
                         `freestone writeback r`";
        let little = "r: backing_dev=/s: its size of 127M is small compared with mem_limit=1G";
        let full = "r: backing_size=8G: the file system of /s has only 7G free";
        for (size, mem_limit, in_memory, free, expected) in [
            (8 * GIB, GIB, false, None, vec![]),
            (GIB / 8, GIB, false, Some(GIB / 8), vec![]),
            (GIB, GIB, true, None, vec![tmpfs]),
            (127 << 20, GIB, false, None, vec![little]),
            (4096, 0, false, None, vec![unlimited]),
            (8 * GIB, GIB, false, Some(7 * GIB), vec![full]),
            (8 * GIB, 0, true, Some(7 * GIB), vec![tmpfs, unlimited, full]),
        ] {
            assert_eq!(
                backing_warnings("r", backing, size, mem_limit, BackingLocation { in_memory, free }),
                expected
            );
        }
    }

    #[test]
    fn backing_location_reports_memory_and_free_space() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new"), dir.path().join("old"));
        std::fs::write(&old, "x").unwrap();
        assert!(BackingLocation::of(&new).free.is_some());
        assert_eq!(BackingLocation::of(&old).free, None);
        assert_eq!(BackingLocation::of(&dir.path().join("no/such/directory")), BackingLocation::default());
        // If /dev/shm exists, it is usually a tmpfs.
        if Path::new("/dev/shm").is_dir() {
            assert!(BackingLocation::of(Path::new("/dev/shm/new")).in_memory);
        }
        assert!(!BackingLocation::of(Path::new("/proc/self/status")).in_memory);
    }
}
