//! Transient store: no record on disk. Each CPU allocates chunks from its own run.

use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::Usage;
use super::format::Layout;
use super::status::SECTOR_BYTES;
use super::store_types::NoPlace;
use freestone_core::percpu;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Chunks per run. The chunks of a run are contiguous, so writes of one CPU stay together.
const RUN_PLACES: u64 = 64;

/// Store without metadata (`store=N`). The order of chunks is irrelevant, so each CPU has its own.
/// A CPU that finds the device full takes chunks of another.
///
/// Lock order: a CPU's run is innermost, held for a few instructions, one at a time.
pub struct Transient {
    layout: Layout,
    /// First chunk that belongs to no CPU.
    next_free: CachePadded<AtomicU64>,
    /// Unused chunks of each CPU.
    runs: Box<[CachePadded<Mutex<Range<u64>>>]>,
    lost: AtomicU32,
}

impl Transient {
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            next_free: CachePadded::new(AtomicU64::new(0)),
            runs: (0..percpu::cpus()).map(|_| CachePadded::default()).collect(),
            lost: AtomicU32::new(0),
        }
    }

    pub fn is_valid(&self) -> bool {
        self.lost.load(Ordering::SeqCst) == 0
    }

    pub fn invalidate(&self) {
        self.lost.store(1, Ordering::SeqCst);
    }

    /// Allocates a chunk of a device of `size` bytes.
    pub fn allocate(&self, size: u64) -> Result<u64, NoPlace> {
        if !self.is_valid() {
            return Err(NoPlace::Invalid);
        }
        let own = {
            let mut run = percpu::lock_nearest(|cpu| &self.runs[cpu]);
            if run.is_empty() {
                *run = self.next_run(self.layout.chunks(size));
            }
            run.next()
        };
        // The device has no further runs, so the other CPUs' runs only shrink.
        let place = own.or_else(|| self.runs.iter().find_map(|run| run.lock().next()));
        place.ok_or(NoPlace::Full)
    }

    /// Returns the next run of a device with `chunks` chunks, or an empty one.
    fn next_run(&self, chunks: u64) -> Range<u64> {
        let end = |free: u64| chunks.min(free + RUN_PLACES);
        let next = |free: u64| (free < chunks).then(|| end(free));
        // Relaxed: only uniqueness matters.
        let taken = self.next_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.map_or(0..0, |free| free..end(free))
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        let left: u64 = self.runs.iter().map(|run| run.lock()).map(|run| run.end - run.start).sum();
        // Relaxed: a statistic. A run that a CPU took just now is not in `left`.
        let allocated = self.next_free.load(Ordering::Relaxed).saturating_sub(left);
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: 0 }
    }
}
