//! Opening of a persistent exception store. The whole list of exceptions is checked before anything
//! is written.
//!
//! The content just read may not be durable. The last session may have crashed between a write and
//! its flush, or a failed write may have left data in a cache. So the blocks written last, the end
//! of the list and the header, are rewritten and flushed before the store is used.

use super::area::{Block, End, RUN_ENTRIES_MAX};
use super::format::{
    self, BLOCK_BYTES, BLOCK_ENTRIES, CHUNK_BYTES_DEFAULT, ENTRY_BYTES, Entry, FIRST_COPY, HeaderContent,
    Layout, Mark, SECTOR_ENTRIES,
};
use super::types::Exceptions;
use crate::cow::config::{CHUNK_BYTES_MIN, Damage, SetupError};
use freestone_core::device::{self, Blocking, Device, Flags, Geometry, IoBuf};

/// Maximum number of exceptions that are loaded; the maximum uses 4 GiB of memory.
const ENTRIES_MAX: usize = 1 << 28;
/// Maximum size of a metadata read in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// Maximum size in bytes of the metadata blocks that a merge step zeroes after the block with the
/// new end of the list.
const REMOVED_BYTES_MAX: u64 = RUN_ENTRIES_MAX * ENTRY_BYTES as u64;
/// Number of chunks of an empty store: the header and one area.
const CHUNKS_MIN: u64 = 2;

pub struct LoadedStore {
    pub layout: Layout,
    pub header: Box<Block>,
    pub valid: bool,
    /// Mark of an interrupted merge, if any.
    pub mark: Option<Mark>,
    pub end: End,
    /// First chunk of the COW device after all chunks in use.
    pub next_free: u64,
    /// Exceptions, sorted by chunk of the origin.
    pub exceptions: Exceptions,
}

impl LoadedStore {
    fn empty(layout: Layout, valid: bool) -> Self {
        let end = End::empty();
        let header = Box::new(format::header(layout.chunk(), valid));
        Self { layout, header, valid, mark: None, end, next_free: FIRST_COPY, exceptions: Vec::new() }
    }
}

/// Opens the store on `cow`, or creates a store if the device starts with zeroes. `requested` is
/// the chunk size in bytes for a new store.
pub fn load(cow: &dyn Device, requested: Option<u64>, origin: &Geometry) -> Result<LoadedStore, SetupError> {
    let geometry = cow.geometry();
    let layout_for = |chunk| {
        let min = CHUNKS_MIN * chunk;
        let layout = Layout::new(chunk, &geometry, origin)?;
        if geometry.size < min {
            return Err(SetupError::TooSmall { size: geometry.size, chunk, min });
        }
        Ok(layout)
    };
    let wanted = requested.unwrap_or(CHUNK_BYTES_DEFAULT);
    Layout::new(wanted, &geometry, origin)?;
    if geometry.size < BLOCK_BYTES as u64 {
        return Err(SetupError::TooSmall {
            size: geometry.size,
            chunk: wanted,
            min: CHUNKS_MIN * CHUNK_BYTES_MIN,
        });
    }
    let mut block = [0; BLOCK_BYTES];
    cow.read_at(0, &mut block).map_err(read_failed)?;
    match format::parse_header(&block)? {
        HeaderContent::New => {
            let layout = layout_for(wanted)?;
            create(cow, layout).map_err(write_failed)?;
            Ok(LoadedStore::empty(layout, true))
        }
        HeaderContent::Store { valid, chunk, mark, closed: _ } => {
            let layout = layout_for(chunk)?;
            if requested.is_some_and(|requested| requested != chunk) {
                tracing::warn!(requested = wanted, chunk, "the exception store keeps its own chunk size");
            }
            if !valid {
                // The list of exceptions of an invalid store is meaningless and is not read.
                cow.write_at(0, &block, Flags::FUA).map_err(write_failed)?;
                return Ok(LoadedStore::empty(layout, false));
            }
            let mut loaded = scan(cow, layout, &geometry, origin.size, mark)?;
            // Makes the present merge mark durable, and removes the record of the close, because
            // the store is in use now.
            format::set_closed(&mut block, None);
            cow.write_at(0, &block, Flags::FUA).map_err(write_failed)?;
            (loaded.mark, loaded.header) = (mark, Box::new(block));
            Ok(loaded)
        }
    }
}

/// Parses the header of `cow`. Returns `None` if `cow` is too small or the header is unknown.
pub fn read_header(cow: &dyn Device) -> Result<Option<HeaderContent>, SetupError> {
    let mut block = [0; BLOCK_BYTES];
    if cow.geometry().size < block.len() as u64 {
        return Ok(None);
    }
    cow.read_at(0, &mut block).map_err(read_failed)?;
    Ok(format::parse_header(&block).ok())
}

/// Creates an empty store. The header is written last; until then the device starts with zeroes.
fn create(cow: &dyn Device, layout: Layout) -> device::Result<()> {
    cow.write_zeroes(0, CHUNKS_MIN * layout.chunk(), Flags::MAY_FREE)?;
    cow.flush()?;
    cow.write_at(0, &format::header(layout.chunk(), true), Flags::FUA)
}

fn scan(
    cow: &dyn Device,
    layout: Layout,
    geometry: &Geometry,
    origin_size: u64,
    mark: Option<Mark>,
) -> Result<LoadedStore, SetupError> {
    let chunks = layout.chunks(geometry.size);
    let mut exceptions = Vec::new();
    let mut area = 0;
    let (end, stale) = loop {
        if layout.area_chunk(area) >= chunks {
            return Err(SetupError::Damaged(Damage::NoEnd));
        }
        if let Some(end) = scan_area(cow, layout, area, geometry.size, origin_size, &mut exceptions)? {
            break end;
        }
        if exceptions.len() as u64 > chunks {
            // With more entries than chunks, some chunks are used twice, which `check_unique`
            // reports.
            break (End::empty(), false);
        }
        area += 1;
    };
    // A merge removes entries from the end, so the entries that remain are the first entries of its
    // list.
    if let (Some(mark), Some(&(first, _))) = (mark, exceptions.first())
        && (first, true) != (mark.first, exceptions.len() as u64 <= mark.entries)
    {
        return Err(SetupError::Mark);
    }
    let next_free = exceptions.iter().map(|&(_, new)| new + 1).max();
    let next_free = layout.skip_metadata(next_free.unwrap_or(FIRST_COPY));
    check_unique(&mut exceptions)?;
    rewrite_end(cow, layout, &end, stale).map_err(write_failed)?;
    Ok(LoadedStore { end, next_free, exceptions, ..LoadedStore::empty(layout, true) })
}

/// Reads the entries of one area into `exceptions`. If the list ends in the area, returns the end,
/// and true if a torn write left entries after the end. Otherwise returns `None`.
fn scan_area(
    cow: &dyn Device,
    layout: Layout,
    area: u64,
    cow_size: u64,
    origin_size: u64,
    exceptions: &mut Exceptions,
) -> Result<Option<(End, bool)>, SetupError> {
    let piece = PIECE_BYTES.min(layout.chunk());
    let mut bytes = IoBuf::zeroed(piece as usize).map_err(|_| SetupError::NoMemory)?;
    let mut found: Option<End> = None;
    let mut stale = false;
    for offset in (0..layout.chunk()).step_by(piece as usize) {
        cow.read_at(layout.area_byte(area) + offset, &mut bytes).map_err(read_failed)?;
        exceptions.try_reserve(bytes.len() / ENTRY_BYTES).map_err(|_| SetupError::NoMemory)?;
        for (at, entry) in (offset / ENTRY_BYTES as u64..).zip(Entry::all(&bytes)) {
            let number = area * layout.entries() + at;
            match &found {
                // Only zeroes or the rest of a torn write follow the end. A sector is written
                // atomically, so no entry can follow in the same sector.
                Some(end) => {
                    if !entry.is_zero() && at / SECTOR_ENTRIES == end.committed / SECTOR_ENTRIES {
                        return Err(damaged(Damage::Gap { entry: area * layout.entries() + end.committed }));
                    }
                    stale |= !entry.is_zero();
                }
                None if entry.is_zero() => {
                    let from = (at % BLOCK_ENTRIES) as usize * ENTRY_BYTES;
                    let block = (at - at % BLOCK_ENTRIES) as usize * ENTRY_BYTES - offset as usize;
                    let mut end = End { area, committed: at, ..End::empty() };
                    end.block[..from].copy_from_slice(&bytes[block..block + from]);
                    found = Some(end);
                }
                None if entry.is_end() => return Err(damaged(Damage::Gap { entry: number })),
                None => {
                    layout.check(number, entry, origin_size, cow_size).map_err(damaged)?;
                    if exceptions.len() == ENTRIES_MAX {
                        return Err(SetupError::TooMany(ENTRIES_MAX));
                    }
                    exceptions.push(entry.get());
                }
            }
        }
    }
    Ok(found.map(|end| (end, stale)))
}

/// Checks that no chunk of either device is used twice. Sorts the exceptions by chunk of the
/// origin.
fn check_unique(exceptions: &mut [(u64, u64)]) -> Result<(), SetupError> {
    exceptions.sort_unstable_by_key(|&(_, new)| new);
    if let Some(twice) = exceptions.windows(2).find(|pair| pair[0].1 == pair[1].1) {
        return Err(damaged(Damage::DuplicateNew(twice[0].1)));
    }
    exceptions.sort_unstable();
    if let Some(twice) = exceptions.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(damaged(Damage::DuplicateOld(twice[0].0)));
    }
    Ok(())
}

/// Rewrites the end of the list and flushes the device. After a torn write the rest of the area is
/// zeroed. The torn entries were never reported as durable, and would become part of the list when
/// later entries fill the gap.
fn rewrite_end(cow: &dyn Device, layout: Layout, end: &End, stale: bool) -> device::Result<()> {
    let start = layout.area_byte(end.area);
    let block = end.committed / BLOCK_ENTRIES * BLOCK_BYTES as u64;
    let behind = block + BLOCK_BYTES as u64;
    let mut zeroes = layout.chunk() - behind;
    if stale {
        tracing::warn!(
            area = end.area,
            entries = end.committed,
            "removing entries of a torn write from the exception store"
        );
    } else {
        zeroes = zeroes.min(REMOVED_BYTES_MAX);
    }
    if zeroes > 0 {
        cow.write_zeroes(start + behind, zeroes, Flags::MAY_FREE)?;
    }
    cow.write_at(start + block, &*end.block, Flags::empty())?;
    cow.flush()
}

fn damaged(damage: Damage) -> SetupError {
    SetupError::Damaged(damage)
}

fn read_failed(source: device::Error) -> SetupError {
    SetupError::Device { what: "reading", source }
}

fn write_failed(source: device::Error) -> SetupError {
    SetupError::Device { what: "writing", source }
}
