//! Reader of a dm-log-writes log. The content of the file is not trusted.

use std::fs::File;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::Error;
use super::format::{
    self, DISCARD, ENTRY_BYTES, FLUSH, FUA, MAGIC, MARK, SECTOR_MAX_BYTES, SECTOR_MIN_BYTES, Super, VERSION,
};

/// Reader of an open log file. Iterates over the entries from the first one on.
#[derive(Debug)]
pub struct Reader {
    file: File,
    path: PathBuf,
    file_bytes: u64,
    sector_bytes: u32,
    entries: u64,
    /// Number of the next entry to read. The entry starts at byte `at` of the file.
    next: u64,
    at: u64,
}

/// Entry of a log. Offsets and lengths are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Index of the entry in the log, from 0.
    pub number: u64,
    /// First byte of the entry's range on the device.
    pub offset: u64,
    /// Number of bytes written or discarded.
    pub len: u64,
    /// Entry flags, such as [`FLUSH`]. See [`format`](mod@super::format).
    pub flags: u64,
    /// Text of the mark, or `None` if the entry is not a mark.
    pub mark: Option<String>,
    /// Position of the entry's data in the file, in bytes.
    data_at: u64,
}

impl Entry {
    /// Returns true if the entry is a flush, which makes all earlier entries durable.
    pub const fn is_flush(&self) -> bool {
        self.flags & FLUSH != 0
    }

    /// Returns true if the entry is a write with FUA, which is durable itself.
    pub const fn is_fua(&self) -> bool {
        self.flags & FUA != 0
    }

    /// Returns true if the entry is a discard, which has no data.
    pub const fn is_discard(&self) -> bool {
        self.flags & DISCARD != 0
    }
}

/// Entries of a log between two flushes, up to and including the second one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Epoch {
    /// Indices of the entries. The last one is the flush, unless the log ends without a flush.
    pub entries: Range<u64>,
}

impl Epoch {
    /// Returns every point of the epoch. A point is the number of entries that are replayed to
    /// reach it.
    pub const fn points(&self) -> RangeInclusive<u64> {
        self.entries.start..=self.entries.end
    }
}

impl Reader {
    /// Opens a log file and checks its header.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, [`Error::Foreign`] if it is not a supported log.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let at_file = |error| Error::File { path: path.into(), error };
        let foreign = |why: String| Error::Foreign { path: path.into(), why };
        let file = File::open(path).map_err(at_file)?;
        let mut head = Super::new_zeroed();
        file.read_exact_at(head.as_mut_bytes(), 0).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => foreign("the file is shorter than a header".into()),
            _ => at_file(error),
        })?;
        if head.magic.get() != MAGIC {
            return Err(foreign(format!("it starts with {:#x}", head.magic)));
        }
        if head.version.get() != VERSION {
            return Err(foreign(format!("version {} is not supported, only {VERSION}", head.version)));
        }
        let sector_bytes = head.sectorsize.get();
        if !sector_bytes.is_power_of_two() || !(SECTOR_MIN_BYTES..=SECTOR_MAX_BYTES).contains(&sector_bytes) {
            return Err(foreign(format!("a sector size of {sector_bytes} bytes is not supported")));
        }
        // The log may be a block device. Its metadata contains no length, but seeking to its end
        // works.
        let file_bytes = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0)).map_err(at_file)?;
        Ok(Self {
            file,
            path: path.into(),
            file_bytes,
            sector_bytes,
            entries: head.nr_entries.get(),
            next: 0,
            at: u64::from(sector_bytes),
        })
    }

    /// Returns the number of entries of the log according to its header.
    pub const fn entries(&self) -> u64 {
        self.entries
    }

    /// Returns the sector size in bytes, which is the logical block of the recorded device.
    pub const fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Makes the first entry the next one to read.
    pub const fn rewind(&mut self) {
        self.next = 0;
        self.at = self.sector_bytes as u64;
    }

    /// Reads and returns the next entry, or `None` at the end of the log.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, [`Error::Damaged`] if the entry is invalid.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, Error> {
        if self.next >= self.entries {
            return Ok(None);
        }
        let number = self.next;
        let damaged = |why| Error::Damaged { path: self.path.clone(), entry: number, why };
        let sector = u64::from(self.sector_bytes);
        if self.at > self.file_bytes || self.file_bytes - self.at < sector {
            return Err(damaged("lies behind the end of the file"));
        }
        let mut bytes = [0; SECTOR_MAX_BYTES as usize];
        let bytes = &mut bytes[..self.sector_bytes as usize];
        self.read(bytes, self.at)?;
        let head =
            format::Entry::ref_from_bytes(&bytes[..ENTRY_BYTES]).map_err(|_| damaged("is too short"))?;
        let place = head.sector.get().checked_mul(sector).zip(head.nr_sectors.get().checked_mul(sector));
        let (offset, len) = place.ok_or_else(|| damaged("lies beyond every device"))?;
        offset.checked_add(len).ok_or_else(|| damaged("lies beyond every device"))?;
        let flags = head.flags.get();
        let mark = if flags & MARK == 0 {
            None
        } else {
            let text =
                usize::try_from(head.data_len.get()).ok().and_then(|len| bytes[ENTRY_BYTES..].get(..len));
            let text = text.ok_or_else(|| damaged("is a mark longer than its sector"))?;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        let data_at = self.at + sector;
        let data = if flags & DISCARD == 0 { len } else { 0 };
        if data > self.file_bytes - data_at {
            return Err(damaged("has data behind the end of the file"));
        }
        self.at = data_at + data;
        self.next += 1;
        Ok(Some(Entry { number, offset, len, flags, mark, data_at }))
    }

    /// Returns the next entry if it is among the first `entries` of the log, else `None`.
    pub(super) fn next_before(&mut self, entries: u64) -> Result<Option<Entry>, Error> {
        if self.next < entries { self.next_entry() } else { Ok(None) }
    }

    /// Fills `out` with the entry's data from byte `from` on.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read.
    ///
    /// # Panics
    /// If the entry has less than `from + out.len()` bytes of data, or is a discard.
    pub fn read_data(&self, entry: &Entry, from: u64, out: &mut [u8]) -> Result<(), Error> {
        assert!(!entry.is_discard() && from + out.len() as u64 <= entry.len, "{entry:?} has less data");
        self.read(out, entry.data_at + from)
    }

    fn read(&self, out: &mut [u8], at: u64) -> Result<(), Error> {
        self.file.read_exact_at(out, at).map_err(|error| Error::File { path: self.path.clone(), error })
    }

    /// Returns the index of the first entry that is a mark with this text.
    ///
    /// # Errors
    /// [`Error::NoMark`] if there is no such mark, and the errors of
    /// [`next_entry`](Self::next_entry).
    pub fn find_mark(&mut self, text: &str) -> Result<u64, Error> {
        self.rewind();
        while let Some(entry) = self.next_entry()? {
            if entry.mark.as_deref() == Some(text) {
                return Ok(entry.number);
            }
        }
        Err(Error::NoMark(text.into()))
    }

    /// Splits the entries of the log at its flushes, and returns the parts in order.
    pub fn epochs(&mut self) -> Result<Vec<Epoch>, Error> {
        self.rewind();
        let mut epochs = Vec::new();
        let mut start = 0;
        while let Some(entry) = self.next_entry()? {
            if entry.is_flush() || entry.number + 1 == self.entries {
                epochs.push(Epoch { entries: start..entry.number + 1 });
                start = entry.number + 1;
            }
        }
        Ok(epochs)
    }
}
