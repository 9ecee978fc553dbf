//! What the threads of experiments 1 and 2 read and write: a RAM disk itself, or a file on it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Result, ensure};
use freestone::device::{Blocking as _, Flags};
use freestone::ram::Ram;

/// A place for records.
pub trait Disk: Sync {
    /// Fills `buffer`, which is page-aligned.
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()>;
    /// Writes `data`, which is page-aligned.
    fn write(&self, at: u64, data: &[u8]) -> Result<()>;
    /// Makes the range as it was before it was first written.
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

/// Opened with `O_DIRECT`.
impl Disk for File {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.read_exact_at(buffer, at)?)
    }

    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        Ok(self.write_all_at(data, at)?)
    }

    /// A file is one thread's, so all of it goes.
    fn empty(&self, at: u64, _len: u64) -> Result<()> {
        ensure!(at == 0, "a file is emptied as a whole");
        Ok(self.set_len(0)?)
    }
}
