//! Transient exception store, without metadata on disk. Each CPU allocates chunks from its own run.

use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::format::Layout;
use super::types::AllocateError;
use crate::cow::Usage;
use crate::cow::status::SECTOR_BYTES;
use freestone_core::percpu::PerCpu;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Number of chunks in a run. The chunks of a run are contiguous on the COW device, so copies made
/// by one CPU stay together.
const RUN_CHUNKS: u64 = 64;

/// Exception store without metadata (`store=N`). The order of chunks is irrelevant, so each CPU
/// allocates from its own run. A CPU that finds the device full allocates from the run of another
/// CPU.
///
/// Lock order: a CPU's run is innermost, held for a few instructions, one at a time.
pub struct Transient {
    layout: Layout,
    /// First chunk of the COW device that belongs to no CPU's run.
    next_free: CachePadded<AtomicU64>,
    /// Run of unused chunks of each CPU.
    runs: PerCpu<Mutex<Range<u64>>>,
    lost: AtomicU32,
}

impl Transient {
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            next_free: CachePadded::new(AtomicU64::new(0)),
            runs: PerCpu::default(),
            lost: AtomicU32::new(0),
        }
    }

    pub fn is_valid(&self) -> bool {
        self.lost.load(Ordering::SeqCst) == 0
    }

    pub fn invalidate(&self) {
        self.lost.store(1, Ordering::SeqCst);
    }

    /// Allocates a chunk of a COW device of `size` bytes and returns its number.
    pub fn allocate(&self, size: u64) -> Result<u64, AllocateError> {
        if !self.is_valid() {
            return Err(AllocateError::Invalid);
        }
        let own = {
            let mut run = self.runs.lock();
            if run.is_empty() {
                *run = self.next_run(self.layout.chunks(size));
            }
            run.next()
        };
        // The device has no further runs, so only chunks of other CPUs' runs may be left.
        let place = own.or_else(|| self.runs.iter().find_map(|run| run.lock().next()));
        place.ok_or(AllocateError::Full)
    }

    /// Returns the next run of a COW device with `chunks` chunks, or an empty range if the device
    /// is full.
    fn next_run(&self, chunks: u64) -> Range<u64> {
        let end = |free: u64| chunks.min(free + RUN_CHUNKS);
        let next = |free: u64| (free < chunks).then(|| end(free));
        // Relaxed: the runs must only be distinct.
        let taken = self.next_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.map_or(0..0, |free| free..end(free))
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        let left: u64 = self.runs.iter().map(|run| run.lock()).map(|run| run.end - run.start).sum();
        // Relaxed: a statistic. `left` may omit a run that a CPU has just allocated.
        let allocated = self.next_free.load(Ordering::Relaxed).saturating_sub(left);
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: 0 }
    }
}
