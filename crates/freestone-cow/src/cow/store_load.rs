//! Opening a persistent exception store: everything on the device is checked before anything is
//! written.
//!
//! What is found need not be durable: the process before may have ended between a write and its
//! answer, or the write failed, and what was read is in a cache. So what was written last, the end
//! of the list and the header, is written again and flushed before anybody relies on it.

use super::config::{CHUNK_BYTES_MIN, Damage, SetupError};
use super::format::{
    self, BLOCK_BYTES, BLOCK_ENTRIES, CHUNK_BYTES_DEFAULT, ENTRY_BYTES, Entry, FIRST_COPY, Found, Layout,
    Mark, SECTOR_ENTRIES,
};
use super::store_answers::Exceptions;
use super::store_area::{Block, End, RUN_ENTRIES_MAX};
use freestone_core::device::{self, Blocking, Device, Flags, Geometry, IoBuf};

/// Most exceptions that are loaded: 4 GiB of memory.
const ENTRIES_MAX: usize = 1 << 28;
/// Metadata is read in pieces of this many bytes at most.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of blocks that a step of a merge empties, at most, besides the one in which the list ends
/// then.
const REMOVED_BYTES_MAX: u64 = RUN_ENTRIES_MAX * ENTRY_BYTES as u64;
/// Chunks that even an empty store has: the header and an area.
const CHUNKS_MIN: u64 = 2;

/// A store that was opened.
pub struct Loaded {
    pub layout: Layout,
    /// The first block.
    pub header: Box<Block>,
    pub valid: bool,
    /// A merge was under way when it was used last.
    pub mark: Option<Mark>,
    pub end: End,
    /// The first chunk that was never handed out.
    pub next_free: u64,
    /// In the order of the origin.
    pub exceptions: Exceptions,
}

impl Loaded {
    fn empty(layout: Layout, valid: bool) -> Self {
        let end = End::empty();
        let header = Box::new(format::header(layout.chunk(), valid));
        Self { layout, header, valid, mark: None, end, next_free: FIRST_COPY, exceptions: Vec::new() }
    }
}

/// Opens the store on `cow`, or makes one.
pub fn load(cow: &dyn Device, asked: Option<u64>, origin: &Geometry) -> Result<Loaded, SetupError> {
    let geometry = cow.geometry();
    let fits = |chunk| {
        let min = CHUNKS_MIN * chunk;
        let layout = Layout::new(chunk, &geometry, origin)?;
        if geometry.size < min {
            return Err(SetupError::TooSmall { size: geometry.size, chunk, min });
        }
        Ok(layout)
    };
    let wanted = asked.unwrap_or(CHUNK_BYTES_DEFAULT);
    Layout::new(wanted, &geometry, origin)?;
    if geometry.size < BLOCK_BYTES as u64 {
        return Err(SetupError::TooSmall {
            size: geometry.size,
            chunk: wanted,
            min: CHUNKS_MIN * CHUNK_BYTES_MIN,
        });
    }
    let mut block = [0; BLOCK_BYTES];
    cow.read_at(0, &mut block).map_err(reading)?;
    match format::parse_header(&block)? {
        Found::New => {
            let layout = fits(wanted)?;
            create(cow, layout).map_err(writing)?;
            Ok(Loaded::empty(layout, true))
        }
        Found::Store { valid, chunk, mark, closed: _ } => {
            let layout = fits(chunk)?;
            if asked.is_some_and(|asked| asked != chunk) {
                tracing::warn!(asked = wanted, chunk, "the exception store has a chunk size of its own");
            }
            if !valid {
                // What it lists means nothing.
                cow.write_at(0, &block, Flags::FUA).map_err(writing)?;
                return Ok(Loaded::empty(layout, false));
            }
            let mut loaded = scan(cow, layout, &geometry, origin.size, mark)?;
            // It may have been marked, or the mark taken away, a moment before. From now on it is
            // in use.
            format::set_closed(&mut block, None);
            cow.write_at(0, &block, Flags::FUA).map_err(writing)?;
            (loaded.mark, loaded.header) = (mark, Box::new(block));
            Ok(loaded)
        }
    }
}

/// What `cow` begins with, where that is understood.
pub fn look(cow: &dyn Device) -> Result<Option<Found>, SetupError> {
    let mut block = [0; BLOCK_BYTES];
    if cow.geometry().size < block.len() as u64 {
        return Ok(None);
    }
    cow.read_at(0, &mut block).map_err(reading)?;
    Ok(format::parse_header(&block).ok())
}

/// Makes an empty store. The header comes last: before it is there, the device still begins with
/// zeroes.
fn create(cow: &dyn Device, layout: Layout) -> device::Result<()> {
    cow.write_zeroes(0, CHUNKS_MIN * layout.chunk(), Flags::MAY_FREE)?;
    cow.flush()?;
    cow.write_at(0, &format::header(layout.chunk(), true), Flags::FUA)
}

/// Reads the areas up to the end of the list.
fn scan(
    cow: &dyn Device,
    layout: Layout,
    geometry: &Geometry,
    origin_size: u64,
    mark: Option<Mark>,
) -> Result<Loaded, SetupError> {
    let chunks = layout.chunks(geometry.size);
    let mut exceptions = Vec::new();
    let mut area = 0;
    let (end, stale) = loop {
        if layout.area_chunk(area) >= chunks {
            return Err(SetupError::Damaged(Damage::Endless));
        }
        if let Some(end) = scan_area(cow, layout, area, geometry.size, origin_size, &mut exceptions)? {
            break end;
        }
        if exceptions.len() as u64 > chunks {
            // More than the COW device has chunks: some are used twice, which is reported below.
            break (End::empty(), false);
        }
        area += 1;
    };
    // What is left of a merge is the beginning of what it began with.
    if let (Some(mark), Some(&(first, _))) = (mark, exceptions.first())
        && (first, true) != (mark.first, exceptions.len() as u64 <= mark.entries)
    {
        return Err(SetupError::Mark);
    }
    let next_free = exceptions.iter().map(|&(_, new)| new + 1).max();
    let next_free = layout.skip_metadata(next_free.unwrap_or(FIRST_COPY));
    check_unique(&mut exceptions)?;
    settle(cow, layout, &end, stale).map_err(writing)?;
    Ok(Loaded { end, next_free, exceptions, ..Loaded::empty(layout, true) })
}

/// Reads one area. If the list ends in it: where, and whether there is something behind the end,
/// which a torn write left.
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
        cow.read_at(layout.area_byte(area) + offset, &mut bytes).map_err(reading)?;
        exceptions.try_reserve(bytes.len() / ENTRY_BYTES).map_err(|_| SetupError::NoMemory)?;
        for (at, entry) in (offset / ENTRY_BYTES as u64..).zip(Entry::all(&bytes)) {
            let number = area * layout.entries() + at;
            match &found {
                // Behind the end there are zeroes, or what a torn write left; but a sector is
                // written whole.
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

/// No chunk may be preserved twice, and no place used twice. Leaves the exceptions in the order of
/// the origin.
fn check_unique(exceptions: &mut [(u64, u64)]) -> Result<(), SetupError> {
    exceptions.sort_unstable_by_key(|&(_, new)| new);
    if let Some(twice) = exceptions.windows(2).find(|pair| pair[0].1 == pair[1].1) {
        return Err(damaged(Damage::NewTwice(twice[0].1)));
    }
    exceptions.sort_unstable();
    if let Some(twice) = exceptions.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(damaged(Damage::OldTwice(twice[0].0)));
    }
    Ok(())
}

/// Writes the end of the list as it was found, and flushes all that was read. Where there is
/// something behind the end, the rest of the area becomes zeroes: what a torn write left there was
/// never told to anybody, and would come back to life when the gap before it is filled.
fn settle(cow: &dyn Device, layout: Layout, end: &End, stale: bool) -> device::Result<()> {
    let start = layout.area_byte(end.area);
    let block = end.committed / BLOCK_ENTRIES * BLOCK_BYTES as u64;
    let behind = block + BLOCK_BYTES as u64;
    let mut zeroes = layout.chunk() - behind;
    if stale {
        tracing::warn!(
            area = end.area,
            entries = end.committed,
            "a torn write of the exception store is cleaned up"
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

fn reading(source: device::Error) -> SetupError {
    SetupError::Device { what: "reading", source }
}

fn writing(source: device::Error) -> SetupError {
    SetupError::Device { what: "writing", source }
}
