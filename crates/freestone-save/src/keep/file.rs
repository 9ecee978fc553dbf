//! A file of kept devices: metadata in memory, and page data read on demand.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Advice;

use super::index::Entry;
use crate::save::format::{FileAlgorithm, KeptRecord, block_sum, form};
use crate::save::reader::Node;
use crate::save::reader::{Block, BlockPlace, Reader};
use crate::save::{BaseIdentity, RestoreError};
use freestone_core::device::Error;
use freestone_core::fail_points::{self, Call};
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{AtomicU32, Instant, Ordering};

/// Metadata of a file of kept devices: everything but page data.
pub struct FileMetadata {
    pub kept: KeptRecord,
    pub bases: Vec<BaseIdentity>,
    pub nodes: Arc<[Node]>,
    pub algorithms: Vec<FileAlgorithm>,
    pub entries: Vec<Vec<Entry>>,
    pub blocks: Blocks,
}

/// The block that was loaded last: entries of one block load it once.
#[derive(Default)]
pub struct LoadedBlock {
    place: Option<(usize, u32)>,
    bytes: Vec<u8>,
}

impl LoadedBlock {
    /// Returns the data of an entry, and loads its block if necessary. `what` describes a damaged block.
    pub fn data(&mut self, of: &Blocks, entry: &Entry, what: &'static str) -> Result<&[u8], RestoreError> {
        let damaged = |_| RestoreError::Damaged { path: of.path.clone(), at: 0, what };
        let place = Some((entry.file(), entry.block));
        if self.place != place {
            self.place = None;
            of.load(entry.block, &mut self.bytes).map_err(damaged)?;
            self.place = place;
        }
        of.data(entry, &self.bytes).map_err(damaged)
    }
}

/// The blocks of a file. The data of a block is verified before use.
pub struct Blocks {
    file: File,
    path: PathBuf,
    salt: u64,
    pub bytes: u64,
    places: Vec<BlockState>,
    scanned: Instant,
    lines: LogLimit<()>,
}

struct BlockState {
    place: BlockPlace,
    node: u32,
    /// [`UNKNOWN`], [`RIGHT`] or [`DAMAGED`]. A value from [`UNREADABLE`] on adds the time of the
    /// last failed read, in seconds since the scan.
    state: AtomicU32,
}

/// Size of each read-ahead request in bytes.
const AHEAD_BYTES: u64 = 8 << 20;

const UNKNOWN: u32 = 0;
const RIGHT: u32 = 1;
const DAMAGED: u32 = 2;
const UNREADABLE: u32 = 3;

/// Read attempts before a block counts as unreadable: a read error may be transient.
const READ_TRIES: u32 = 3;
/// Seconds before an unreadable block is read again, so that a save does not wait for the same bad
/// sector once per page.
const UNREADABLE_SECS: u32 = 1;

/// Reads the metadata of a file and verifies its records. `number` is the file's number in its
/// chain.
///
/// # Errors
/// As [`inspect`](crate::save::inspect); also if a record is invalid, or the file is not a file of
/// kept devices.
pub fn scan(path: &Path, number: usize) -> Result<FileMetadata, RestoreError> {
    let mut reader = Reader::open_any(path)?;
    let Some(kept) = reader.kept else { return Err(RestoreError::Foreign(path.to_owned())) };
    let mut entries: Vec<Vec<Entry>> = reader.nodes.iter().map(|_| Vec::new()).collect();
    let (mut algorithms, mut places, mut passed) = (Vec::new(), Vec::new(), 0_u32);
    loop {
        match reader.skim()? {
            None => break,
            Some(Block::Algorithm(learned)) => algorithms.push(learned),
            Some(Block::Pages { node, place, pages }) => {
                let mut data = 0;
                let of_node = &mut entries[node as usize];
                for record in pages.records {
                    of_node.push(Entry::new(record, number, passed, data));
                    data += if form::is_run(record.form) { 0 } else { u32::from(record.len.get()) };
                }
                places.push(BlockState { place, node, state: AtomicU32::new(UNKNOWN) });
                passed += 1;
            }
        }
    }
    let (bases, nodes) = (std::mem::take(&mut reader.bases), Arc::clone(&reader.nodes));
    let (salt, bytes) = (reader.salt, reader.end.file_bytes);
    let (file, path) = (reader.into_file(), path.to_owned());
    let blocks =
        Blocks { file, path, salt, bytes, places, scanned: Instant::now(), lines: LogLimit::default() };
    Ok(FileMetadata { kept, bases, nodes, algorithms, entries, blocks })
}

impl Blocks {
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of the node (device or snapshot) whose pages are in a block.
    pub fn node(&self, block: u32) -> u32 {
        self.places[block as usize].node
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a whole block into `into` and verifies its checksum.
    ///
    /// # Errors
    /// [`Error::Media`] if the block is damaged or unreadable.
    pub fn load(&self, block: u32, into: &mut Vec<u8>) -> Result<(), Error> {
        let of = &self.places[block as usize];
        let BlockState { place, state, .. } = of;
        into.resize(place.bytes as usize, 0);
        self.read_exact(of, into, place.at)?;
        let sum = block_sum(into, self.salt).to_le_bytes();
        let right = into[..sum.len()] == sum;
        // Relaxed: the state describes data that the caller has read itself, or a file that does
        // not change.
        state.store(if right { RIGHT } else { DAMAGED }, Ordering::Relaxed);
        if !right {
            self.log_unusable(place.at, &"a block's checksum is wrong");
            return Err(Error::Media);
        }
        Ok(())
    }

    /// Reads part of a block, with retries. Fails at once if a read failed in the last second.
    fn read_exact(&self, of: &BlockState, into: &mut [u8], at: u64) -> Result<(), Error> {
        let now = self.scanned.elapsed().as_secs() as u32;
        // Relaxed: the state describes a file that does not change.
        let state = of.state.load(Ordering::Relaxed);
        if state >= UNREADABLE && now.saturating_sub(state - UNREADABLE) < UNREADABLE_SECS {
            return Err(Error::Media);
        }
        let mut read = || fail_points::call(Call::ReadData, || self.file.read_exact_at(into, at));
        let Err(error) = (1..READ_TRIES).fold(read(), |outcome, _| outcome.or_else(|_| read())) else {
            return Ok(());
        };
        self.log_unusable(of.place.at, &error);
        let now = self.scanned.elapsed().as_secs() as u32;
        // Relaxed: the state describes a file that does not change.
        of.state.store(UNREADABLE.saturating_add(now), Ordering::Relaxed);
        Err(Error::Media)
    }

    /// Returns true if the block was read and its checksum was wrong.
    pub fn is_damaged(&self, block: u32) -> bool {
        // Relaxed: the state describes a file that does not change.
        self.places[block as usize].state.load(Ordering::Relaxed) == DAMAGED
    }

    /// Requests read-ahead from the kernel before blocks are loaded in order. `asked` is the end of
    /// the range already requested.
    pub fn read_ahead(&self, block: u32, asked: &mut u64) {
        let place = self.places[block as usize].place;
        // Request large pieces, as each call makes the kernel scan the range.
        if place.at + AHEAD_BYTES / 2 > *asked {
            let from = place.at.max(*asked);
            *asked = place.at + AHEAD_BYTES;
            // An optimisation only; some file systems do not support it.
            let _ = rustix::fs::fadvise(&self.file, from, NonZeroU64::new(*asked - from), Advice::WillNeed);
        }
    }

    /// Returns the data of an entry from a [loaded](Self::load) block; fails if it is outside the
    /// block.
    pub fn data<'a>(&self, entry: &Entry, loaded: &'a [u8]) -> Result<&'a [u8], Error> {
        let place = self.places[entry.block as usize].place;
        let (at, len) = entry.data(place);
        let from = (at - place.at) as usize;
        loaded.get(from..from + len).ok_or(Error::Media)
    }

    /// Reads the data of one entry; the first read of a block loads and verifies the whole block.
    ///
    /// # Errors
    /// [`Error::Media`] if the block is damaged or unreadable.
    pub fn read(&self, entry: &Entry, into: &mut Vec<u8>) -> Result<(), Error> {
        let of = &self.places[entry.block as usize];
        // Relaxed: the state describes a file that does not change.
        match of.state.load(Ordering::Relaxed) {
            DAMAGED => return Err(Error::Media),
            RIGHT => {}
            _ => {
                let mut block = Vec::new();
                self.load(entry.block, &mut block)?;
                into.clear();
                into.extend_from_slice(self.data(entry, &block)?);
                return Ok(());
            }
        }
        let (at, len) = entry.data(of.place);
        into.resize(len, 0);
        self.read_exact(of, into, at)
    }

    #[cold]
    fn log_unusable(&self, at: u64, why: &dyn std::fmt::Display) {
        if let Some(held_back) = self.lines.admit(()) {
            tracing::error!(
                "{}: block at byte {at}: {why}; its pages are lost{held_back}",
                self.path.display()
            );
        }
    }
}
