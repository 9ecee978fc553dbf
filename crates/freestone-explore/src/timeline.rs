//! A recorded run: the log, and the content of the disk when the recording began.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone_core::device::{self, Device};
use freestone_drive::power::log::{self, Entry, Reader};
use freestone_ram::ram::{Config, Family, ForkConfig, Ram};

use crate::Result;

/// Number of blocks above which a discard is durable at once, as the power layer writes it past its
/// cache.
const BULK_BLOCKS: u64 = 4096;

/// Content of the disk at the start of the recording.
pub enum Base {
    /// Zeroes, with this size of the disk in bytes.
    Zeroes(u64),
    /// The content of a read-only device.
    Device(Arc<dyn Device>),
}

impl Base {
    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Zeroes(size) => *size,
            Self::Device(device) => device.geometry().size,
        }
    }
}

/// A log whose entries were checked, over its base.
pub struct Timeline {
    path: PathBuf,
    size: u64,
    sector_bytes: u64,
    entries: u64,
    base: Base,
    family: Family,
    /// Reads the data of entries, for all threads.
    data: Reader,
    /// Points whose states are not all states of the window before, ascending: before each flush and
    /// mark, after each write with FUA, and the end. Writes that can be lost at another point can be
    /// lost at the next window as well.
    windows: Vec<u64>,
}

impl Timeline {
    /// Opens a log, and checks all its entries. All disks of the exploration together may use
    /// `mem_limit` bytes of memory; 0 means no limit.
    ///
    /// # Errors
    /// The log cannot be read, is not a log, or is damaged; an entry lies beyond the end of the base.
    pub fn open(path: &Path, base: Base, mem_limit: u64) -> Result<Self> {
        let mut reader = Reader::open(path)?;
        let size = base.size();
        let windows = scan(&mut reader, size)?;
        let data = Reader::open(path)?;
        let family = Family::new(Config { mem_limit, ..Config::default() })?;
        family.set_name("explore");
        Ok(Self {
            path: path.into(),
            size,
            sector_bytes: reader.sector_bytes().into(),
            entries: reader.entries(),
            base,
            family,
            data,
            windows,
        })
    }

    /// Returns the number of entries of the log.
    pub const fn entries(&self) -> u64 {
        self.entries
    }

    /// Returns the size of the disk in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the logical block of the recorded device in bytes.
    pub const fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    pub(crate) fn windows(&self) -> &[u64] {
        &self.windows
    }

    /// Returns the first point at or after `point` whose choices include those at `point`.
    pub(crate) fn window_of(&self, point: u64) -> u64 {
        let at = self.windows.partition_point(|window| *window < point);
        self.windows.get(at).copied().unwrap_or(self.entries)
    }

    pub(crate) const fn data(&self) -> &Reader {
        &self.data
    }

    /// Opens the log at its first entry.
    pub(crate) fn reader(&self) -> Result<Reader> {
        Ok(Reader::open(&self.path)?)
    }

    /// Returns true for a discard that is durable at once.
    pub(crate) const fn is_bulk(&self, entry: &Entry) -> bool {
        entry.is_discard() && entry.len / self.sector_bytes > BULK_BLOCKS
    }

    /// Creates a disk with the content at the start of the recording.
    pub fn disk(&self) -> Result<Ram> {
        Ok(match &self.base {
            Base::Zeroes(size) => self.family.ram(*size)?,
            Base::Device(device) => self.family.fork(Arc::clone(device), &ForkConfig::default())?,
        })
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timeline({}, {} entries)", self.path.display(), self.entries)
    }
}

/// Checks all entries, and returns the points of [`Timeline::windows`].
fn scan(reader: &mut Reader, size: u64) -> Result<Vec<u64>> {
    let mut windows = Vec::new();
    // True if states at the next window were not states at the window before.
    let mut is_new = true;
    while let Some(entry) = reader.next_entry()? {
        if entry.offset + entry.len > size {
            return Err(log::Error::Device { entry: entry.number, error: device::Error::OutOfRange }.into());
        }
        if (entry.is_flush() || entry.mark.is_some()) && is_new {
            windows.push(entry.number);
            is_new = false;
        }
        // A flush alone makes no new state: what can be lost before it can be lost at the window.
        is_new |= entry.len > 0 || entry.mark.is_some();
        if entry.len > 0 && entry.is_fua() {
            windows.push(entry.number + 1);
            is_new = false;
        }
    }
    if is_new {
        windows.push(reader.entries());
    }
    Ok(windows)
}
