//! Writing a log.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::Error;
use super::format::{DISCARD, Entry, FLUSH, MAGIC, MARK, Super, VERSION};
use freestone_core::file_locks::Held;
use freestone_core::replace::{MadeFile, NEW_PREFIX, Place, Unfinished};

/// The most that one entry zeroes, in bytes: `replay-log` reads an entry's data into memory as a
/// whole.
const ZEROES_MAX_BYTES: u64 = 8 << 20;
/// The most that one entry discards, in bytes: `replay-log` passes over larger ones where it has to
/// write zeroes.
const DISCARD_MAX_BYTES: u64 = 128 << 20;

/// Writes a log. Entries are gathered in memory until they are committed.
///
/// The head counts an entry only when all of it is in the file, and it is rewritten with each
/// commit. So when the process dies the head is right. When the machine dies it is right up to the
/// last mark: there, entries are synced before the head is written, and the head after it.
#[derive(Debug)]
pub struct Writer {
    file: File,
    /// Lists the file as open in this process. `None` for a file that never gets a name.
    #[expect(dead_code, reason = "it is there to be dropped")]
    held: Option<Held>,
    path: PathBuf,
    /// The file before it has its name.
    unnamed: Option<(Place, Unfinished)>,
    sector_bytes: u32,
    /// Entries that the head counts.
    entries: u64,
    /// Bytes that hold those.
    end: u64,
    /// Entries since.
    added: u64,
    /// Where the next entry goes.
    next: u64,
    /// Bytes for `next - gathered.len()` that are not in the file.
    gathered: Vec<u8>,
}

impl Writer {
    /// Creates the file. The file gets its name with its head, so a log that is cut off before
    /// that leaves nothing.
    ///
    /// # Errors
    /// [`Error::Exists`]: a recording begins with the device's state of this moment, so it cannot go on with an old log;
    /// [`Error::File`].
    pub fn create(path: &Path) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::File { path: path.into(), error };
        match fs::symlink_metadata(path) {
            Ok(_) => return Err(Error::Exists { path: path.into() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let place = Place::new(path).map_err(failed)?;
        let unnamed = place.begin(NEW_PREFIX).map_err(failed)?;
        let file = unnamed.as_file().try_clone().map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
        // What reads a log while it is written needs no lock; what would replace it has to see one.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| failed(errno.into()))?;
        let held = Some(Held::new(&stat));
        Ok(Self { held, unnamed: Some((place, unnamed)), ..Self::on(file, path) })
    }

    /// Returns the file as it lies at its path once the recording has begun, to be removed if the
    /// device is not made after all.
    ///
    /// # Errors
    /// The system's.
    pub fn made(&self) -> io::Result<Option<MadeFile>> {
        self.unnamed.as_ref().map(|(place, unnamed)| unnamed.made(place)).transpose()
    }

    pub(in crate::power) fn on(file: File, path: &Path) -> Self {
        let path = path.into();
        let gathered = Vec::new();
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
            gathered,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the head of an empty log with sectors of this size, and gives the file its name.
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

    /// Entries in the file.
    pub(in crate::power) const fn entries(&self) -> u64 {
        self.entries
    }

    /// Bytes of the file.
    pub(in crate::power) const fn bytes(&self) -> u64 {
        self.end
    }

    /// Number of the entry that comes next.
    pub(in crate::power) const fn next_entry(&self) -> u64 {
        self.entries + self.added
    }

    pub(in crate::power) fn data(&mut self, sector: u64, flags: u64, data: &[u8]) {
        self.entry(sector, data.len() as u64 / u64::from(self.sector_bytes), flags, &[]);
        self.gathered.extend_from_slice(data);
        self.next += data.len() as u64;
    }

    /// Zeroes that are written take no space in the file, where its file system has holes.
    pub(in crate::power) fn zeroes(&mut self, sector: u64, sectors: u64, flags: u64) -> Result<(), Error> {
        self.pieces(sector, sectors, ZEROES_MAX_BYTES, |writer, sector, sectors| {
            writer.entry(sector, sectors, flags, &[]);
            writer.write_gathered()?;
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
        let from = self.gathered.len();
        self.gathered.extend_from_slice(entry.as_bytes());
        self.gathered.extend_from_slice(text);
        self.gathered.resize(from + self.sector_bytes as usize, 0);
        self.next += u64::from(self.sector_bytes);
        self.added += 1;
    }

    /// Puts what was gathered into the file, then counts it in the head. With `sync` it is durable
    /// then.
    pub(in crate::power) fn commit(&mut self, sync: bool) -> Result<(), Error> {
        self.write_gathered()?;
        // Zeroes at the end are not in the file yet.
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

    fn write_gathered(&mut self) -> Result<(), Error> {
        let at = self.next - self.gathered.len() as u64;
        let gathered = std::mem::take(&mut self.gathered);
        self.at_file(|file| file.write_all_at(&gathered, at))?;
        self.gathered = gathered;
        self.gathered.clear();
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
