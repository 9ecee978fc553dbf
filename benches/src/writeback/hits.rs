//! `hits` part: share of a zipfian load that is served from memory, with room for a quarter of the
//! data, compared with exact LRU.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Params, Scratch, Streams};
use freestone::device::{Blocking, Buffer, Device, Request, TryResult};
use freestone::ram::Ram;
use freestone_report::{Row, Summary, Target, Unit, mib};

use super::backing::{self, BackingFile, Layout};
use super::{Bench, Part};
use crate::data::Data;
use crate::data::zipf::{Lru, Zipf};
use crate::engine::bare::same_filled;

const THETA: f64 = 1.1;
const SEED: u64 = 20;
/// Warm-up accesses and counted accesses, in multiples of the number of pages.
const WARM: u64 = 2;
const COUNTED: u64 = 10;
/// Step to which the pool rounds up object sizes, in bytes.
const CLASS_STEP_BYTES: usize = 16;
/// Low mark, to which eviction reduces the memory, relative to the memory limit.
const LOW_MARK: f64 = 0.90;

pub(super) fn run(bench: &Bench) -> Result<Part> {
    let sizes = object_bytes(&bench.data)?;
    let limit = (sizes.stored / 4).next_multiple_of(PAGE_BYTES as u64);
    let file = BackingFile::new(&bench.dir, bench.data.bytes())?;
    let ram = file.disk(bench.data.pages, Layout::Packed, limit)?;
    let start = Instant::now();
    backing::fill(&ram, &bench.data, 1)?;
    let fill_seconds = start.elapsed().as_secs_f64();
    let lru = |capacity| lru_share(&sizes.rounded, capacity);
    let (exact, low) = (lru(limit), lru((limit as f64 * LOW_MARK) as u64));
    let before = ram.bd_stat();
    let start = Instant::now();
    let ours = our_share(&ram, &bench.data)?;
    let seconds = start.elapsed().as_secs_f64();
    let after = ram.bd_stat();
    let percent = |share: f64| Summary::one(100.0 * share);
    let accesses = (bench.data.pages * COUNTED) as f64;
    let rows = vec![
        Row::new("zipf: exact LRU less ours, percentage points", Unit::Points, percent(exact - ours))
            .target(Target::AtMost(5.0)),
        Row::new("zipf: served from memory, ours", Unit::Percent, percent(ours))
            .part("us an access", seconds * 1e6 / (accesses + (bench.data.pages * WARM) as f64))
            .part("blocks read", (after.bd_reads - before.bd_reads) as f64)
            .part("written", (after.bd_writes - before.bd_writes) as f64)
            .part("pool MiB", mib(ram.mm_stat().mem_used_total))
            .part("objects MiB", mib(ram.mm_stat().compr_data_size)),
        Row::new("zipf: served from memory, exact LRU", Unit::Percent, percent(exact))
            .part("mem_limit MiB", mib(limit))
            .part("of compressed MiB", mib(sizes.stored)),
        Row::new("zipf: exact LRU with 0.9 of it", Unit::Percent, percent(low)),
        Row::single("zipf: fill beyond the limit", Unit::Seconds, fill_seconds)
            .part("MB/s", bench.data.bytes() as f64 / 1e6 / fill_seconds),
    ];
    let notes = vec![format!(
        "Zipf: one thread reads pages by fio's zipf:{THETA} with its scattering and a fixed seed, {WARM} x \
         pages to warm up, {COUNTED} x pages counted. A page is served from memory if try_io completes it at \
         once. mem_limit is a quarter of the compressed bytes. Exact LRU on the same trace (fill and warm-up \
         included) holds as many pages as fit into mem_limit, with object sizes rounded up to the pool's \
         {CLASS_STEP_BYTES}; it has no fragmentation and needs no room to write. Same-filled pages are always \
         in memory, on both sides."
    )];
    Ok(Part { notes, rows })
}

struct Sizes {
    /// Sum of the compressed sizes in bytes, not rounded.
    stored: u64,
    /// Compressed size of each page in bytes, rounded up to the size class of the pool; 0 if the
    /// slot's word holds the page.
    rounded: Vec<u16>,
}

fn object_bytes(data: &Data) -> Result<Sizes> {
    let streams = Streams::new(Algorithm::Lz4, &Params::default())?;
    let mut scratch = Scratch::new();
    let mut page = [0; PAGE_BYTES];
    let mut sizes = Sizes { stored: 0, rounded: Vec::with_capacity(data.pages as usize) };
    for number in 0..data.pages {
        data.read(number, &mut page)?;
        let bytes = match same_filled(&page) {
            Some(_) => 0,
            None => streams.compress(&page, &mut scratch).map_or(PAGE_BYTES, <[u8]>::len),
        };
        sizes.stored += bytes as u64;
        sizes.rounded.push(bytes.next_multiple_of(CLASS_STEP_BYTES) as u16);
    }
    Ok(sizes)
}

/// Returns the numbers of the pages to read, each with true if the read counts, false for the
/// warm-up.
fn trace(pages: u64) -> impl Iterator<Item = (u32, bool)> {
    let mut zipf = Zipf::new(SEED, THETA, pages);
    (0..pages * (WARM + COUNTED)).map(move |at| (zipf.next() as u32, at >= pages * WARM))
}

fn lru_share(sizes: &[u16], capacity: u64) -> f64 {
    let mut lru = Lru::new(sizes.to_vec(), capacity);
    let pages = sizes.len() as u64;
    for page in 0..pages as u32 {
        lru.access(page);
    }
    let mut hits = 0_u64;
    for (page, counts) in trace(pages) {
        hits += u64::from(lru.access(page) && counts);
    }
    hits as f64 / (pages * COUNTED) as f64
}

fn our_share(ram: &Ram, data: &Data) -> Result<f64> {
    let mut page = [0; PAGE_BYTES];
    let mut expected = [0; PAGE_BYTES];
    let mut hits = 0_u64;
    let mut checked = 0_u64;
    for (number, counts) in trace(data.pages) {
        let request = Request::read(u64::from(number) * PAGE_BYTES as u64, PAGE_BYTES as u64);
        match ram.try_io(&request, Buffer::Read(&mut page))? {
            TryResult::Done => hits += u64::from(counts),
            TryResult::WouldBlock => {
                ram.read_at(request.offset, &mut page)?;
                // Verify a sample only: verifying every page would take as long as the reads.
                if checked.is_multiple_of(16) {
                    data.read(u64::from(number), &mut expected)?;
                    ensure!(page == expected, "page {number} has other content after a read from the disk");
                }
                checked += 1;
            }
            TryResult::Partly(_) => bail!("a read returned a part of a page"),
        }
    }
    Ok(hits as f64 / (data.pages * COUNTED) as f64)
}
