//! The implementation of [`Kernel`] with the real control device, device nodes and sysfs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, major, makedev, minor, mknodat, open};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use crate::kernel::abi::CtrlCmd;
use crate::kernel::control::is_id;
use crate::kernel::device_claim;
use crate::kernel::uring::{self, QueueRing};
use crate::kernel::{BlockDevice, CharDevice, Kernel, NodeClaim, Ring};

/// Poll interval while waiting for a node.
const NODE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time after which this process creates a node that neither devtmpfs nor udev has created.
const CREATE_NODE_AFTER: Duration = Duration::from_secs(2);

/// Paths of `/dev` and `/sys`, which tests replace.
#[derive(Debug, Clone)]
pub struct System {
    dev: PathBuf,
    sys: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self { dev: "/dev".into(), sys: "/sys".into() }
    }
}

impl System {
    fn control(&self) -> Result<OwnedFd, Errno> {
        open(self.dev.join("ublk-control"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    }

    /// Opens the node `name` of a device in the sysfs class `class`. Waits until the device and the
    /// node exist.
    fn node(&self, class: &str, name: &str, kind: FileType, until: Instant) -> io::Result<(OwnedFd, Node)> {
        let path = self.dev.join(name);
        let numbers = self.sys.join("class").join(class).join(name).join("dev");
        let flags = if kind == FileType::CharacterDevice { OFlags::RDWR } else { OFlags::RDONLY };
        let make_at = Instant::now() + CREATE_NODE_AFTER;
        let mut created = false;
        loop {
            let wanted = fs::read_to_string(&numbers).ok().and_then(|text| device_number(&text));
            let mut last = Errno::NOENT;
            if let Some((high, low)) = wanted {
                let opened = open(&path, flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
                match opened.and_then(|file| fstat(&file).map(|stat| (file, stat))) {
                    Ok((file, stat)) if FileType::from_raw_mode(stat.st_mode) == kind => {
                        if (major(stat.st_rdev), minor(stat.st_rdev)) == (high, low) {
                            return Ok((file, Node { path, created }));
                        }
                    }
                    Ok(_) => {}
                    Err(errno) => last = errno,
                }
                if last == Errno::NOENT && !created && Instant::now() >= make_at {
                    let access = Mode::RUSR | Mode::WUSR;
                    match mknodat(CWD, &path, kind, access, makedev(high, low)) {
                        Ok(()) => created = true,
                        Err(Errno::EXIST) => {}
                        // Only root can create nodes.
                        Err(Errno::PERM | Errno::ACCESS) => return Err(last.into()),
                        Err(errno) => return Err(errno.into()),
                    }
                    continue;
                }
            }
            if Instant::now() >= until {
                return Err(last.into());
            }
            std::thread::sleep(NODE_POLL_INTERVAL);
        }
    }
}

fn device_number(text: &str) -> Option<(u32, u32)> {
    let (high, low) = text.trim().split_once(':')?;
    Some((high.parse().ok()?, low.parse().ok()?))
}

/// A device node, removed on drop if this process created it.
struct Node {
    path: PathBuf,
    created: bool,
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.created {
            let _ = fs::remove_file(&self.path);
        }
    }
}

struct Char {
    device: Arc<OwnedFd>,
    _node: Node,
}

impl CharDevice for Char {
    fn ring(&self, queue: u16, depth: u16, user_copy: bool, wake: &OwnedFd) -> io::Result<Box<dyn Ring>> {
        Ok(Box::new(QueueRing::new(Arc::clone(&self.device), queue, depth, user_copy, wake)?))
    }
}

struct Block {
    node: Node,
}

impl BlockDevice for Block {
    fn path(&self) -> PathBuf {
        self.node.path.clone()
    }

    fn claim(&self) -> io::Result<Option<Box<dyn NodeClaim>>> {
        device_claim::claim(&self.node.path)
    }

    fn mount_point(&self) -> Option<PathBuf> {
        device_claim::mount_point(&self.node.path)
    }
}

impl Kernel for System {
    fn check(&self) -> Result<(), Errno> {
        self.control().map(drop)
    }

    fn is_admin(&self) -> bool {
        // If the capabilities are unknown, the driver rejects commands that are not permitted.
        capabilities(None).map_or(true, |sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
    }

    fn command(&self, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno> {
        uring::command(&self.control()?, command, header, payload)
    }

    fn char_path(&self, id: u32) -> PathBuf {
        self.dev.join(format!("ublkc{id}"))
    }

    fn open(&self, id: u32, until: Instant) -> io::Result<Arc<dyn CharDevice>> {
        let name = format!("ublkc{id}");
        let (device, node) = self.node("ublk-char", &name, FileType::CharacterDevice, until)?;
        Ok(Arc::new(Char { device: Arc::new(device), _node: node }))
    }

    fn block(&self, id: u32, until: Instant) -> io::Result<Arc<dyn BlockDevice>> {
        let (_, node) = self.node("block", &format!("ublkb{id}"), FileType::BlockDevice, until)?;
        Ok(Arc::new(Block { node }))
    }

    fn devices(&self) -> io::Result<Vec<u32>> {
        match fs::read_dir(self.sys.join("class/ublk-char")) {
            Ok(entries) => {
                let mut ids: Vec<_> =
                    entries.filter_map(|entry| id_of(Path::new(&entry.ok()?.file_name()))).collect();
                ids.sort_unstable();
                Ok(ids)
            }
            // The directory does not exist if the driver is not loaded.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

fn id_of(name: &Path) -> Option<u32> {
    name.to_str()?.strip_prefix("ublkc")?.parse().ok().filter(|id| is_id(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_lists_sysfs_entries() {
        let dir = tempfile::tempdir().unwrap();
        let system = System { dev: dir.path().join("dev"), sys: dir.path().join("sys") };
        assert_eq!(system.devices().unwrap(), [0; 0]);
        for name in ["ublkc7", "ublkc0", "ublkb3", "ublkcx", "ublkc1048576", "ublkc-1"] {
            fs::create_dir_all(dir.path().join("sys/class/ublk-char").join(name)).unwrap();
        }
        assert_eq!(system.devices().unwrap(), [0, 7]);
    }

    #[test]
    fn missing_driver_and_node_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let system = System { dev: dir.path().join("dev"), sys: dir.path().join("sys") };
        assert_eq!(system.check(), Err(Errno::NOENT));
        assert_eq!(system.command(0, CtrlCmd::new(0, 0), &mut []), Err(Errno::NOENT));
        let began = Instant::now();
        let until = began + Duration::from_millis(50);
        let error = system.open(0, until).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(began.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn open_refuses_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let system = System { dev: dir.path().to_path_buf(), sys: dir.path().join("sys") };
        let class = dir.path().join("sys/class/ublk-char/ublkc4");
        fs::create_dir_all(&class).unwrap();
        fs::write(class.join("dev"), "240:4\n").unwrap();
        fs::write(dir.path().join("ublkc4"), "").unwrap();
        assert!(system.open(4, Instant::now() + Duration::from_millis(30)).is_err());
        assert_eq!(device_number("259:3\n"), Some((259, 3)));
        assert_eq!(device_number("259"), None);
    }
}
