//! A small key-value store on a block device: a journal, values in a heap, a directory, and headers.
//!
//! | blocks of 4 KiB | content |
//! |---|---|
//! | 0, 1 | headers, written in turn: generation, and the number of the first put in the journal |
//! | 2, 3 | directory, written in place: for each key the value's place, number and checksum |
//! | 4, 5 | copy of the directory, written before it |
//! | 6 | statistics: the number of puts in the directory |
//! | 8 to 31 | journal: records of two blocks |
//! | 32 to 51 | heap: values of two blocks |
//!
//! A put appends a record with FUA. A checkpoint moves the values of the journal to the heap, flushes, updates the
//! directory, and starts the journal again. [`Bug`] switches one step off.

use freestone_core::device::{Blocking as _, Device, Flags, Result};
use xxhash_rust::xxh3::xxh3_64;

const BLOCK: usize = 4096;
const HEADERS: u64 = 0;
const DIRECTORY: u64 = 2;
const COPY: u64 = 4;
const STATISTICS: u64 = 6;
const JOURNAL: u64 = 8;
const HEAP: u64 = 32;
/// Number of keys: more than puts in the journal, so that some values are in the directory only. Each key uses two
/// places of the heap, in turn.
const KEYS: u64 = 5;
/// Number of puts between two checkpoints.
const PUTS_PER_CHECKPOINT: u64 = 4;
const VALUE_BYTES: usize = 6000;
const RECORD_HEAD_BYTES: usize = 32;
const MAGIC: u64 = 0x7469_6e79_7374_6f72;

/// An error of a program that stores data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// No error.
    None,
    /// The values are not flushed before the directory points to them (no fsync of the file).
    FileFlush,
    /// The directory is not durable before the journal is reused (no fsync of the directory).
    DirectoryFlush,
    /// The header is replaced before the content it stands for is written (rename before flush).
    EarlyRename,
    /// The header is overwritten in place, so it may be torn.
    TornHeader,
    /// The checksum of a record covers its first block only.
    ChecksumRange,
    /// The second block of a record is written after the record was committed.
    LateWrite,
    /// A record is written without FUA, and acknowledged.
    LostFua,
    /// The directory is overwritten without a copy.
    DoubleWrite,
    /// The old value is discarded while the directory still points to it.
    EarlyDiscard,
    /// The statistics are written before the directory that they describe.
    FileOrder,
}

impl Bug {
    /// All errors, with their names on the command line.
    pub const ALL: [(&'static str, Self); 11] = [
        ("none", Self::None),
        ("file-flush", Self::FileFlush),
        ("directory-flush", Self::DirectoryFlush),
        ("early-rename", Self::EarlyRename),
        ("torn-header", Self::TornHeader),
        ("checksum-range", Self::ChecksumRange),
        ("late-write", Self::LateWrite),
        ("lost-fua", Self::LostFua),
        ("double-write", Self::DoubleWrite),
        ("early-discard", Self::EarlyDiscard),
        ("file-order", Self::FileOrder),
    ];
}

/// Pointer to a key's value in the heap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Pointer {
    /// Number of the put, or 0 without a value.
    put: u64,
    place: u64,
    checksum: u64,
}

/// An open store.
struct Store<'a> {
    device: &'a dyn Device,
    bug: Bug,
    generation: u64,
    directory: [Pointer; KEYS as usize],
    /// Number of the first put in the journal.
    first: u64,
}

/// Returns the value that a put stores.
fn value(put: u64) -> Vec<u8> {
    (0..VALUE_BYTES as u64).map(|at| (put * 31 + at * 7 + at / 512) as u8).collect()
}

const fn key(put: u64) -> u64 {
    put % KEYS
}

/// Appends a checksum as the last word of a block.
fn seal(words: &[u64], blocks: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // The content reaches into each sector, as that of a real structure would.
    let fill = words.iter().fold(0_u8, |sum, word| sum.wrapping_mul(31).wrapping_add(*word as u8));
    bytes.resize(blocks * BLOCK - 8, fill);
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Returns the words of a structure, or `None` if its checksum is wrong.
fn unseal(bytes: &[u8]) -> Option<Vec<u64>> {
    let (content, checksum) = bytes.split_at(bytes.len() - 8);
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    (checksum == xxh3_64(content).to_le_bytes()).then(|| words.collect())
}

impl Store<'_> {
    fn write(&self, block: u64, data: &[u8], flags: Flags) -> Result<()> {
        self.device.write_at(block * BLOCK as u64, data, flags)
    }

    fn write_directory(&self, block: u64, flags: Flags) -> Result<()> {
        let words = self.directory.iter().flat_map(|place| [place.put, place.place, place.checksum]);
        self.write(block, &seal(&words.collect::<Vec<_>>(), 2), flags)
    }

    fn write_statistics(&self) -> Result<()> {
        let last = self.directory.iter().map(|place| place.put).max().unwrap_or_default();
        self.write(STATISTICS, &seal(&[last], 1), Flags::empty())
    }

    fn write_header(&mut self) -> Result<()> {
        self.generation += 1;
        let slot = if self.bug == Bug::TornHeader { 0 } else { self.generation % 2 };
        self.write(HEADERS + slot, &seal(&[MAGIC, self.generation, self.first], 1), Flags::FUA)
    }

    fn format(&mut self) -> Result<()> {
        self.write_directory(DIRECTORY, Flags::empty())?;
        self.write_directory(COPY, Flags::empty())?;
        self.write_statistics()?;
        self.device.flush()?;
        self.write_header()?;
        self.device.flush()
    }

    fn put(&self, put: u64, acknowledge: &mut dyn FnMut(u64)) -> Result<()> {
        let mut record = vec![0; RECORD_HEAD_BYTES];
        record.extend_from_slice(&value(put));
        record.resize(2 * BLOCK, 0);
        record[..8].copy_from_slice(&put.to_le_bytes());
        let checksum = record_checksum(&record, self.bug == Bug::ChecksumRange);
        record[8..16].copy_from_slice(&checksum.to_le_bytes());
        let block = JOURNAL + (put - self.first) * 2;
        if self.bug == Bug::LateWrite {
            self.write(block, &record[..BLOCK], Flags::FUA)?;
            acknowledge(put);
            return self.write(block + 1, &record[BLOCK..], Flags::empty());
        }
        let flags = if self.bug == Bug::LostFua { Flags::empty() } else { Flags::FUA };
        self.write(block, &record, flags)?;
        acknowledge(put);
        Ok(())
    }

    fn checkpoint(&mut self, next: u64) -> Result<()> {
        let former = self.directory;
        for put in self.first..next {
            let place = &mut self.directory[key(put) as usize];
            // Only the last put of a key is kept.
            place.place = former[key(put) as usize].place ^ 1;
            place.put = put;
            place.checksum = xxh3_64(&value(put));
        }
        let changed: Vec<_> = (0..KEYS as usize).filter(|key| self.directory[*key] != former[*key]).collect();
        let discard = |store: &Self| {
            let freed = changed.iter().filter(|key| former[**key].put > 0);
            freed.copied().try_for_each(|key| {
                store.device.discard(heap(former[key].place) * BLOCK as u64, 2 * BLOCK as u64)
            })
        };
        if self.bug == Bug::EarlyRename {
            self.first = next;
            self.write_header()?;
        }
        if self.bug == Bug::EarlyDiscard {
            discard(self)?;
        }
        for key in &changed {
            let Pointer { put, place, .. } = self.directory[*key];
            let mut data = value(put);
            data.resize(2 * BLOCK, 0);
            self.write(heap(place), &data, Flags::empty())?;
        }
        if self.bug != Bug::FileFlush {
            self.device.flush()?;
        }
        if self.bug == Bug::FileOrder {
            self.write_statistics()?;
        }
        if self.bug != Bug::DoubleWrite {
            self.write_directory(COPY, Flags::FUA)?;
        }
        let flags = if self.bug == Bug::DirectoryFlush { Flags::empty() } else { Flags::FUA };
        self.write_directory(DIRECTORY, flags)?;
        if self.bug == Bug::DirectoryFlush {
            // Without the directory, its copy is as old.
            self.write_directory(COPY, flags)?;
        }
        if self.bug != Bug::FileOrder {
            self.write_statistics()?;
        }
        if self.bug != Bug::EarlyRename {
            self.first = next;
            self.write_header()?;
        }
        if self.bug != Bug::EarlyDiscard {
            discard(self)?;
        }
        Ok(())
    }
}

const fn heap(place: u64) -> u64 {
    HEAP + place * 2
}

/// Returns the checksum of a record, without the field of the checksum.
fn record_checksum(record: &[u8], is_short: bool) -> u64 {
    let end = if is_short { BLOCK } else { record.len() };
    let mut bytes = record[..end].to_vec();
    bytes[8..16].fill(0);
    xxh3_64(&bytes)
}

/// Formats the device, and puts `puts` values. `acknowledge` receives the number of each durable put, from 0 for the
/// format.
pub fn workload(device: &dyn Device, bug: Bug, puts: u64, acknowledge: &mut dyn FnMut(u64)) -> Result<()> {
    let places = std::array::from_fn(|key| Pointer { place: key as u64 * 2, ..Pointer::default() });
    let mut store = Store { device, bug, generation: 0, directory: places, first: 1 };
    store.format()?;
    acknowledge(0);
    for put in 1..=puts {
        store.put(put, acknowledge)?;
        if put % PUTS_PER_CHECKPOINT == 0 {
            store.checkpoint(put + 1)?;
        }
    }
    device.flush()
}

/// Opens the store as after a power loss, and checks it. `acknowledged` is the number of the last put that was
/// acknowledged, or `None` if the format was not.
///
/// # Errors
/// Describes the damage.
pub fn verify(device: &dyn Device, bug: Bug, acknowledged: Option<u64>) -> std::result::Result<(), String> {
    let Some(acknowledged) = acknowledged else { return Ok(()) };
    let read = |block: u64, blocks: usize| {
        let mut data = vec![0; blocks * BLOCK];
        device.read_at(block * BLOCK as u64, &mut data).map_err(|error| error.to_string())?;
        Ok::<_, String>(data)
    };
    let headers = [unseal(&read(HEADERS, 1)?), unseal(&read(HEADERS + 1, 1)?)];
    let header = headers.into_iter().flatten().filter(|words| words[0] == MAGIC).max_by_key(|words| words[1]);
    let first = header.ok_or("no header is valid")?[2];
    let directory = match unseal(&read(DIRECTORY, 2)?) {
        Some(words) => words,
        None => unseal(&read(COPY, 2)?).ok_or("neither the directory nor its copy is valid")?,
    };
    let mut newest = [0; KEYS as usize];
    for (key, words) in directory.chunks_exact(3).take(KEYS as usize).enumerate() {
        let (put, place, checksum) = (words[0], words[1], words[2]);
        let data = read(heap(place), 2)?;
        if put > 0 && xxh3_64(&data[..VALUE_BYTES]) != checksum {
            return Err(format!("key {key}: the value of put {put} is damaged"));
        }
        newest[key] = put;
    }
    let statistics = unseal(&read(STATISTICS, 1)?).map_or(0, |words| words[0]);
    let stored = newest.iter().copied().max().unwrap_or_default();
    if statistics > stored {
        return Err(format!("the statistics count put {statistics}, the directory has {stored}"));
    }
    for put in first..first + PUTS_PER_CHECKPOINT {
        let record = read(JOURNAL + (put - first) * 2, 2)?;
        let checksum = record_checksum(&record, bug == Bug::ChecksumRange);
        if record[..8] != put.to_le_bytes() || record[8..16] != checksum.to_le_bytes() {
            break;
        }
        if record[RECORD_HEAD_BYTES..][..VALUE_BYTES] != value(put) {
            return Err(format!("the record of put {put} is damaged"));
        }
        newest[key(put) as usize] = newest[key(put) as usize].max(put);
    }
    for put in acknowledged.saturating_sub(KEYS - 1).max(1)..=acknowledged {
        let found = newest[key(put) as usize];
        if found < put {
            return Err(format!("put {put} was acknowledged, but its key has put {found}"));
        }
    }
    Ok(())
}
