//! Exclusive claims on a block device, which prevent mounts, and control of its page cache.
#![expect(unsafe_code)]
// UNSAFETY: an ioctl without a safe wrapper.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, Mode, OFlags, fadvise, fsync, major, minor, open, stat};
use rustix::io::Errno;
use rustix::ioctl::{NoArg, Opcode, ioctl, opcode};

use crate::kernel::NodeClaim;

/// `BLKFLSBUF`: writes back the dirty pages of a block device's cache, and drops the cache.
const FLUSH_BUFFERS: Opcode = opcode::none(0x12, 97);

/// A block device node, opened exclusively.
struct Node(OwnedFd);

impl NodeClaim for Node {
    fn sync(&self) -> io::Result<()> {
        Ok(fsync(&self.0)?)
    }

    fn drop_cache(&self) -> io::Result<()> {
        // SAFETY: the ioctl takes no argument, and changes no memory of this process.
        match unsafe { ioctl(&self.0, NoArg::<FLUSH_BUFFERS>::new()) } {
            // BLKFLSBUF needs CAP_SYS_ADMIN. fadvise drops the same pages, since none of them is
            // dirty after `sync`.
            Err(Errno::ACCESS | Errno::PERM) => Ok(fadvise(&self.0, 0, None, Advice::DontNeed)?),
            done => Ok(done?),
        }
    }
}

/// Opens a block device exclusively, like a mount. Returns `None` if the device is gone.
///
/// # Errors
/// `EBUSY` if a mounted file system, swap or another block device uses the device or a partition.
pub fn claim(path: &Path) -> io::Result<Option<Box<dyn NodeClaim>>> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match open(path, flags, Mode::empty()) {
        Ok(file) => Ok(Some(Box::new(Node(file)))),
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the mount point of a block device or of one of its partitions, in this process's mount
/// namespace.
pub fn mount_point(path: &Path) -> Option<PathBuf> {
    let number = stat(path).ok()?.st_rdev;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    find_mount(&mounts, &format!("{}:{}", major(number), minor(number)), path)
}

/// Finds the mount of a device with the device number `numbers`, or with a source at `path`. The
/// source matters for file systems over several devices, which have device numbers of their own.
fn find_mount(mounts: &[u8], numbers: &str, path: &Path) -> Option<PathBuf> {
    let path = path.as_os_str().as_encoded_bytes();
    let is_source = |source: &[u8]| match source.strip_prefix(path) {
        Some([]) => true,
        Some([b'p', partition @ ..]) => !partition.is_empty() && partition.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        let fields: Vec<_> = line.split(|byte| *byte == b' ').collect();
        let (of, at) = (fields.get(2)?, fields.get(4)?);
        let optional = fields.iter().position(|field| *field == b"-")?;
        let source = fields.get(optional + 2)?;
        (*of == numbers.as_bytes() || is_source(source)).then(|| unescape(at))
    })
}

/// Decodes a path of mountinfo: the kernel writes blanks and backslashes as octal escapes such as
/// `\040`.
fn unescape(text: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        let digits = after.get(..3).filter(|_| *byte == b'\\');
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            path.push(byte);
            rest = &after[3..];
        } else {
            path.push(*byte);
            rest = after;
        }
    }
    std::ffi::OsString::from_vec(path).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"22 28 0:20 / /sys rw,nosuid - sysfs sysfs rw\n\
        40 28 259:3 / /mnt/a\\040b rw shared:1 - ext4 /dev/root rw\n\
        41 28 0:52 / /mnt/btrfs rw - btrfs /dev/ublkb1 rw\n\
        42 28 259:9 / /mnt/part rw - ext4 /dev/ublkb2p1 rw\n";

    #[test]
    fn mounts_are_found_by_number_and_source() {
        let find = |numbers, path| find_mount(MOUNTS, numbers, Path::new(path));
        assert_eq!(find("259:3", "/dev/ublkb0"), Some("/mnt/a b".into()));
        assert_eq!(find("259:4", "/dev/ublkb1"), Some("/mnt/btrfs".into()));
        assert_eq!(find("259:8", "/dev/ublkb2"), Some("/mnt/part".into()));
        assert_eq!(find("259:8", "/dev/ublkb"), None);
        assert_eq!(find("259:8", "/dev/ublkb22"), None);
    }

    #[test]
    fn claim_of_an_absent_node_finds_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(claim(&dir.path().join("ublkb0")).unwrap().is_none());
        assert_eq!(mount_point(&dir.path().join("ublkb0")), None);
    }
}
