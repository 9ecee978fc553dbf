//! Interface of the disks in experiments 1 and 2: a RAM disk, or a file on a RAM disk.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Result, ensure};
use freestone::device::{Blocking as _, Flags};
use freestone::ram::Ram;

/// A disk or file on which threads read and write records.
pub trait Disk: Sync {
    /// Reads at the offset `at` into `buffer`, which is page-aligned.
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()>;
    /// Writes `data`, which is page-aligned, at the offset `at`.
    fn write(&self, at: u64, data: &[u8]) -> Result<()>;
    /// Restores the state that a range had before its first write.
    fn empty(&self, at: u64, len: u64) -> Result<()>;
}

impl Disk for Ram {
    #[inline]
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.read_at(at, buffer)?)
    }

    #[inline]
    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        Ok(self.write_at(at, data, Flags::empty())?)
    }

    fn empty(&self, at: u64, len: u64) -> Result<()> {
        Ok(self.discard(at, len)?)
    }
}

/// A file opened with `O_DIRECT`.
impl Disk for File {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.read_exact_at(buffer, at)?)
    }

    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        Ok(self.write_all_at(data, at)?)
    }

    /// Truncates the file. Each file belongs to one thread, so the range is the whole file.
    fn empty(&self, at: u64, _len: u64) -> Result<()> {
        ensure!(at == 0, "a file is emptied as a whole");
        Ok(self.set_len(0)?)
    }
}
