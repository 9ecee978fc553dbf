//! What is warned of where a device is set up: what works, and may not be meant.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use freestone::ram;

use crate::size::human;

/// A full table of slots takes this part of the disk's size: 8 bytes for each page of 4 KiB.
const DISK_TO_TABLE: u64 = 512;
/// From this part of the memory on, a table is worth a word.
const MEMORY_TO_TABLE: u64 = 8;
/// A backing device with less than this part of the memory that it relieves is hardly one.
const MEMORY_TO_BACKING: u64 = 8;

/// File systems that are memory, by their numbers in `statfs`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Warns where a new RAM disk brings the sum of the limits above the memory, and where its table
/// can grow large. `others` are the limits of the disks that are there; 0 is no limit, which
/// somebody asked for and is not counted.
pub fn of_memory(
    name: &str,
    new: &ram::Config,
    others: impl Iterator<Item = u64>,
    memory: u64,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let before = others.fold(0, u64::saturating_add);
    let sum = before.saturating_add(new.mem_limit);
    // Once: the next disk finds it above already.
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
            "{name}: disksize={disksize}: when all of it is written its table takes {table}, which mem_limit does \
             not bound; the machine has {memory}"
        ));
    }
    warnings
}

/// Where a backing device lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Its file system is memory, or it is a device that is.
    pub in_memory: bool,
    /// For a file that is made: bytes that its file system has left.
    pub free: Option<u64>,
}

impl Place {
    /// Looks, before the device is opened. What cannot be looked at is left to the opening.
    pub fn of(path: &Path) -> Self {
        let found = fs::metadata(path).ok();
        let at = match (&found, path.parent()) {
            // The directory of the disks is a tmpfs too.
            (Some(meta), _) if meta.file_type().is_block_device() => return Self::default(),
            (None, Some(dir)) if !dir.as_os_str().is_empty() => dir,
            (None, _) => Path::new("."),
            (Some(_), _) => path,
        };
        let in_memory =
            rustix::fs::statfs(at).is_ok_and(|s| matches!(s.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC));
        let room = if found.is_none() { rustix::fs::statvfs(at).ok() } else { None };
        Self { in_memory, free: room.map(|room| room.f_bavail.saturating_mul(room.f_frsize)) }
    }
}

/// Warns where a backing device will not do what it is for. `size` is its size in bytes.
pub fn of_backing(name: &str, path: &Path, size: u64, mem_limit: u64, place: Place) -> Vec<String> {
    let mut warnings = Vec::new();
    let path = path.display();
    if place.in_memory {
        warnings.push(format!("{name}: backing_dev={path}: lies in memory itself, so it frees none"));
    }
    if mem_limit == 0 {
        warnings.push(format!(
            "{name}: backing_dev={path}: without a mem_limit nothing goes there by itself, only with `freestone \
             writeback {name}`"
        ));
    } else if size < mem_limit / MEMORY_TO_BACKING {
        let (size, mem_limit) = (human(size), human(mem_limit));
        warnings
            .push(format!("{name}: backing_dev={path}: its {size} are little beside mem_limit={mem_limit}"));
    }
    if let Some(free) = place.free.filter(|free| *free < size) {
        let (size, free) = (human(size), human(free));
        warnings.push(format!("{name}: backing_size={size}: the file system of {path} has only {free} free"));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use freestone::ram::Config;

    use super::{Place, of_backing, of_memory};

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_is_added_up() {
        let sum = |sum| {
            format!(
                "r: the RAM disks, forks and copies may take {sum} together (mem_limit), the machine has 8G"
            )
        };
        let table = "r: disksize=513G: when all of it is written its table takes 1G, which mem_limit does not \
                     bound; the machine has 8G";
        for (disksize, mem_limit, others, expected) in [
            (GIB, 4 * GIB, &[4 * GIB][..], vec![]),
            (GIB, 4 * GIB, &[4 * GIB, 1], vec![sum("8G")]),
            (GIB, 5 * GIB, &[4 * GIB, GIB], vec![sum("10G")]),
            // Said before.
            (GIB, 4 * GIB, &[4 * GIB, 5 * GIB], vec![]),
            // No limit was asked for.
            (GIB, 0, &[0, 4 * GIB, 4 * GIB], vec![]),
            (GIB, u64::MAX, &[GIB], vec![sum("16777215.9T")]),
            (512 * GIB, GIB, &[], vec![]),
            (513 * GIB, GIB, &[], vec![table.to_owned()]),
            (513 * GIB, 9 * GIB, &[], vec![sum("9G"), table.to_owned()]),
        ] {
            let new = Config { disksize, mem_limit, ..Config::default() };
            assert_eq!(of_memory("r", &new, others.iter().copied(), 8 * GIB), expected);
        }
    }

    #[test]
    fn a_backing_device_should_help() {
        let backing = Path::new("/s");
        let tmpfs = "r: backing_dev=/s: lies in memory itself, so it frees none";
        let unlimited = "r: backing_dev=/s: without a mem_limit nothing goes there by itself, only with \
                         `freestone writeback r`";
        let little = "r: backing_dev=/s: its 127M are little beside mem_limit=1G";
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
            assert_eq!(of_backing("r", backing, size, mem_limit, Place { in_memory, free }), expected);
        }
    }

    #[test]
    fn places_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new"), dir.path().join("old"));
        std::fs::write(&old, "x").unwrap();
        assert!(Place::of(&new).free.is_some());
        assert_eq!(Place::of(&old).free, None);
        assert_eq!(Place::of(&dir.path().join("no/such/directory")), Place::default());
        // Every Linux has one there.
        if Path::new("/dev/shm").is_dir() {
            assert!(Place::of(Path::new("/dev/shm/new")).in_memory);
        }
        assert!(!Place::of(Path::new("/proc/self/status")).in_memory);
    }
}
