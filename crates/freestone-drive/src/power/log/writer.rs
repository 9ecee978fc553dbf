//! Writer of a dm-log-writes log.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::Error;
use super::format::{DISCARD, Entry, FLUSH, MAGIC, MARK, Super, VERSION};
use freestone_core::file_locks::FileRegistration;
use freestone_core::replace::{CreatedFile, NEW_PREFIX, ReplaceTarget, TemporaryFile};

/// Maximum number of bytes zeroed by one entry. Limited because `replay-log` reads the data of an
/// entry into memory at once.
const ZEROES_MAX_BYTES: u64 = 8 << 20;
/// Maximum number of bytes discarded by one entry. Limited because `replay-log` skips larger
/// discards if it must write zeroes instead.
const DISCARD_MAX_BYTES: u64 = 128 << 20;

/// Writer of a dm-log-writes log. Entries are collected in memory until they are committed.
///
/// The header counts only entries that are completely in the file, and each commit rewrites the
/// header. So the log is valid after a crash of the process. After a crash of the machine the log
/// is valid up to the last mark: a commit with a mark syncs first the entries and then the header.
#[derive(Debug)]
pub struct Writer {
    file: File,
    /// Registration of the file as open in this process. `None` for a file without a path, as in
    /// tests.
    #[expect(dead_code, reason = "kept for its Drop")]
    held: Option<FileRegistration>,
    path: PathBuf,
    /// File while it has no path yet, and the target at which [`begin`](Self::begin) links it.
    unnamed: Option<(ReplaceTarget, TemporaryFile)>,
    sector_bytes: u32,
    /// Number of entries that the header counts.
    entries: u64,
    /// End in the file of the entries that the header counts, in bytes.
    end: u64,
    /// Number of entries added since the last commit.
    added: u64,
    /// Position of the next entry in the file, in bytes.
    next: u64,
    /// The last bytes before `next`, which are not written to the file yet.
    pending: Vec<u8>,
}

impl Writer {
    /// Creates the log file without a name. The file is linked at `path` when the recording starts,
    /// after its header was written. So a crash before that leaves no file.
    ///
    /// # Errors
    /// [`Error::Exists`] if a file exists, since a recording starts with the device's present
    /// content and cannot continue an old log. [`Error::File`] if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::File { path: path.into(), error };
        match fs::symlink_metadata(path) {
            Ok(_) => return Err(Error::Exists { path: path.into() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let place = ReplaceTarget::new(path).map_err(failed)?;
        let unnamed = place.begin(NEW_PREFIX).map_err(failed)?;
        let file = unnamed.as_file().try_clone().map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
        // The lock shows programs that would replace the file that the file is in use. Readers of
        // the unfinished log ignore the lock.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| failed(errno.into()))?;
        let held = Some(FileRegistration::new(&stat));
        Ok(Self { held, unnamed: Some((place, unnamed)), ..Self::on(file, path) })
    }

    /// Returns the file that will be linked at the path when the recording starts, or `None` if it
    /// was linked already. The caller removes the file if creating the device fails.
    pub fn created_file(&self) -> io::Result<Option<CreatedFile>> {
        self.unnamed.as_ref().map(|(place, unnamed)| unnamed.created_file(place)).transpose()
    }

    pub(in crate::power) fn on(file: File, path: &Path) -> Self {
        let path = path.into();
        let pending = Vec::new();
        Self {
            file,
            held: None,
            path,
            unnamed: None,
            sector_bytes: 0,
            entries: 0,
            end: 0,
            added: 0,
            next: 0,
            pending,
        }
    }

    /// Returns the path of the log file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the header of an empty log with this sector size in bytes, and links the file at its
    /// path.
    pub(in crate::power) fn begin(&mut self, sector_bytes: u32) -> Result<(), Error> {
        self.sector_bytes = sector_bytes;
        self.end = u64::from(sector_bytes);
        self.next = self.end;
        let head = self.head(0);
        self.at_file(|file| file.write_all_at(&head, 0))?;
        let Some((place, unnamed)) = self.unnamed.take() else { return Ok(()) };
        place.put_new(unnamed).map(drop).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { path: self.path.clone() },
            _ => Error::File { path: self.path.clone(), error },
        })
    }

    /// Returns the number of entries that the header of the file counts.
    pub(in crate::power) const fn entries(&self) -> u64 {
        self.entries
    }

    /// Returns the size in bytes of the entries that the header counts, including the header.
    pub(in crate::power) const fn bytes(&self) -> u64 {
        self.end
    }

    /// Returns the index of the next entry, which is the number of entries added so far.
    pub(in crate::power) const fn next_entry(&self) -> u64 {
        self.entries + self.added
    }

    pub(in crate::power) fn data(&mut self, sector: u64, flags: u64, data: &[u8]) {
        self.entry(sector, data.len() as u64 / u64::from(self.sector_bytes), flags, &[]);
        self.pending.extend_from_slice(data);
        self.next += data.len() as u64;
    }

    /// Adds a write of zeroes. The zeroes use no space in the file if the file system supports
    /// holes.
    pub(in crate::power) fn zeroes(&mut self, sector: u64, sectors: u64, flags: u64) -> Result<(), Error> {
        self.pieces(sector, sectors, ZEROES_MAX_BYTES, |writer, sector, sectors| {
            writer.entry(sector, sectors, flags, &[]);
            writer.write_pending()?;
            writer.next += sectors * u64::from(writer.sector_bytes);
            Ok(())
        })
    }

    pub(in crate::power) fn discard(&mut self, sector: u64, sectors: u64, flags: u64) -> Result<(), Error> {
        self.pieces(sector, sectors, DISCARD_MAX_BYTES, |writer, sector, sectors| {
            writer.entry(sector, sectors, flags | DISCARD, &[]);
            Ok(())
        })
    }

    pub(in crate::power) fn flush(&mut self) {
        self.entry(0, 0, FLUSH, &[]);
    }

    pub(in crate::power) fn mark(&mut self, text: &[u8]) {
        self.entry(0, 0, MARK, text);
    }

    fn pieces(
        &mut self,
        sector: u64,
        sectors: u64,
        most_bytes: u64,
        mut piece: impl FnMut(&mut Self, u64, u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let most = most_bytes / u64::from(self.sector_bytes);
        let mut at = 0;
        while at < sectors {
            let count = most.min(sectors - at);
            piece(self, sector + at, count)?;
            at += count;
        }
        Ok(())
    }

    fn entry(&mut self, sector: u64, sectors: u64, flags: u64, text: &[u8]) {
        let entry = Entry {
            sector: U64::new(sector),
            nr_sectors: U64::new(sectors),
            flags: U64::new(flags),
            data_len: U64::new(text.len() as u64),
        };
        let from = self.pending.len();
        self.pending.extend_from_slice(entry.as_bytes());
        self.pending.extend_from_slice(text);
        self.pending.resize(from + self.sector_bytes as usize, 0);
        self.next += u64::from(self.sector_bytes);
        self.added += 1;
    }

    /// Writes the collected entries to the file, then counts them in the header. With `sync`, the
    /// entries are durable afterwards.
    pub(in crate::power) fn commit(&mut self, sync: bool) -> Result<(), Error> {
        self.write_pending()?;
        // Zeroes at the end were not written, so the file may be too short.
        let next = self.next;
        self.at_file(|file| if file.metadata()?.len() < next { file.set_len(next) } else { Ok(()) })?;
        if sync {
            self.at_file(File::sync_data)?;
        }
        let head = self.head(self.entries + self.added);
        self.at_file(|file| file.write_all_at(&head, 0))?;
        if sync {
            self.at_file(File::sync_data)?;
        }
        self.entries += self.added;
        self.added = 0;
        self.end = self.next;
        Ok(())
    }

    fn write_pending(&mut self) -> Result<(), Error> {
        let at = self.next - self.pending.len() as u64;
        let pending = std::mem::take(&mut self.pending);
        self.at_file(|file| file.write_all_at(&pending, at))?;
        self.pending = pending;
        self.pending.clear();
        Ok(())
    }

    fn head(&self, entries: u64) -> Vec<u8> {
        let head = Super {
            magic: U64::new(MAGIC),
            version: U64::new(VERSION),
            nr_entries: U64::new(entries),
            sectorsize: U32::new(self.sector_bytes),
        };
        let mut bytes = head.as_bytes().to_vec();
        bytes.resize(self.sector_bytes as usize, 0);
        bytes
    }

    fn at_file(&self, work: impl FnOnce(&File) -> io::Result<()>) -> Result<(), Error> {
        work(&self.file).map_err(|error| Error::File { path: self.path.clone(), error })
    }
}
