//! Block devices of this machine, as the kernel shows them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::helper::line_of;

const BLOCK: &str = "/sys/block";

/// Returns the loop devices of this machine, each with its backing file.
pub fn loop_devices() -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let entries = fs::read_dir(BLOCK).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let file = line_of(&entry.path().join("loop/backing_file"))?;
        Some((Path::new("/dev").join(entry.file_name()), file.into()))
    })
}

/// Returns the loop devices whose backing file is `file`.
pub fn loops_of(file: &Path) -> Vec<PathBuf> {
    loop_devices().filter(|(_, of)| of == file).map(|(device, _)| device).collect()
}

/// Returns the ID of the process that connected an NBD device, or `None` if the device is not connected.
pub fn nbd_client(device: &Path) -> Option<String> {
    line_of(&Path::new(BLOCK).join(device.file_name()?).join("pid"))
}

/// Returns true unless a file system or another exclusive user has opened the block device. A missing device counts as
/// unused.
pub fn is_unused(device: &Path) -> bool {
    let opened = File::options().read(true).custom_flags(OFlags::EXCL.bits().cast_signed()).open(device);
    !opened.is_err_and(|e| e.kind() == io::ErrorKind::ResourceBusy)
}
