//! A RAM disk over a backing device with faults, and a byte vector with the expected content.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Device, Error, Flags};
use freestone::ram::{Config, Ram};
use freestone_testkit::{FaultyDisk, Rng, first_difference};

pub const PAGE: u64 = 4096;
pub const MIB: u64 = 1 << 20;
pub const BLOCK: u64 = 512;
pub const NONE: Flags = Flags::empty();
/// Deadline for any operation on a busy machine.
pub const LONG: Duration = Duration::from_secs(120);

/// Layouts of evicted pages on the backing device: with `compressed_writeback` (packed), and
/// without.
pub const LAYOUTS: [bool; 2] = [true, false];

/// A RAM disk and the backing device to which it evicts pages.
pub struct Disk {
    pub ram: Ram,
    pub backing: Arc<FaultyDisk>,
}

impl Disk {
    pub fn new(config: Config, backing: FaultyDisk, packed: bool) -> Self {
        let backing = Arc::new(backing);
        let below = Arc::clone(&backing) as Arc<dyn Device>;
        Self { ram: Ram::new(config.backed_by(below, packed)).unwrap(), backing }
    }

    /// Returns a disk without a memory limit, so that pages are evicted only by explicit writeback.
    pub fn manual(disksize: u64, backing_blocks: u64, packed: bool) -> Self {
        let config = Config { disksize, ..Config::default() };
        Self::new(config, FaultyDisk::new((backing_blocks * PAGE) as usize, PAGE as u32), packed)
    }

    pub fn write(&self, page: u64, data: &[u8]) {
        self.ram.write_at(page * PAGE, data, NONE).unwrap();
    }

    pub fn read(&self, page: u64, pages: u64) -> Result<Vec<u8>, Error> {
        let mut data = vec![0xAA; (pages * PAGE) as usize];
        self.ram.read_at(page * PAGE, &mut data).map(|()| data)
    }

    /// Returns the statistics of `bd_stat` in the kernel's order: blocks in use, reads, writes.
    pub fn bd_stat(&self) -> (u64, u64, u64) {
        let stat = self.ram.bd_stat();
        (stat.bd_count, stat.bd_reads, stat.bd_writes)
    }

    pub fn spilled_pages(&self) -> u64 {
        self.ram.backing().unwrap().spilled_pages
    }

    /// Discards the whole disk. Afterwards, memory and backing device must be empty, and all
    /// requests to the backing device must have been valid.
    #[track_caller]
    pub fn check_clean_end(&self) {
        self.backing.heal();
        // Requests that had timed out complete now, and pending writes finish.
        eventually("the backing is idle", || {
            self.backing.counts().in_flight == 0 && self.ram.backing().unwrap().abandoned_writes == 0
        });
        self.ram.discard(0, self.ram.geometry().size).unwrap();
        eventually("nothing is left", || self.leftovers().is_none());
        assert_eq!(self.leftovers(), None);
        assert_eq!(self.backing.violations(), [""; 0]);
    }

    /// Returns the statistics as text if one is not zero although the disk is empty, else None.
    fn leftovers(&self) -> Option<String> {
        let (mm, bd, backing) = (self.ram.mm_stat(), self.ram.bd_stat(), self.ram.backing().unwrap());
        let memory = (mm.orig_data_size, mm.compr_data_size, mm.same_pages, mm.huge_pages);
        let below = (bd.bd_count, backing.used_bytes, backing.live_bytes, backing.spilled_pages);
        (memory != (0, 0, 0, 0) || below != (0, 0, 0, 0)).then(|| format!("{mm:?} {bd:?} {backing:?}"))
    }
}

/// Waits until `done` returns true. Panics after `LONG`.
#[track_caller]
pub fn eventually(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "not within {LONG:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns `len` bytes of a kind: 0 zeroes, 1 a pattern of 32 bits, 2 one of 64 bits, 3 text, 4
/// half noise, 5 noise. Pages of kind 3 to 5 are all different.
pub fn content(kind: u8, seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let word = rng.word() | 1;
    let mut data = vec![0; len];
    for (piece, number) in data.chunks_mut(512).zip(0..) {
        match kind % 6 {
            0 => {}
            1 => piece.fill(word as u8),
            2 => piece.chunks_mut(8).for_each(|at| at.copy_from_slice(&word.to_ne_bytes()[..at.len()])),
            3 => {
                rng.fill(piece);
                for byte in piece {
                    *byte = b"etaoin shrdlu"[usize::from(*byte) % 13];
                }
            }
            4 if number % 8 < 4 => piece.fill(b's'),
            _ => rng.fill(piece),
        }
    }
    data
}

/// Returns incompressible pages, which depend only on the seed.
pub fn noise(seed: u64, pages: u64) -> Vec<u8> {
    content(5, seed, (pages * PAGE) as usize)
}

/// The expected content of a disk.
pub struct ByteModel(pub Vec<u8>);

impl ByteModel {
    pub fn new(size: u64) -> Self {
        Self(vec![0; size as usize])
    }

    fn range(offset: u64, len: u64) -> Range<usize> {
        offset as usize..(offset + len) as usize
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.0[Self::range(offset, data.len() as u64)].copy_from_slice(data);
    }

    pub fn zero(&mut self, offset: u64, len: u64) {
        self.0[Self::range(offset, len)].fill(0);
    }

    /// Discards the whole pages inside a range. Like a RAM disk, keeps partial pages.
    pub fn discard(&mut self, offset: u64, len: u64) {
        let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
        if start < end {
            self.zero(start, end - start);
        }
    }

    /// Checks the content after a failed request that would have written `wanted`. Each block must
    /// have its old or its new content, which is recorded.
    #[track_caller]
    pub fn after_failure(&mut self, ram: &Ram, offset: u64, wanted: &[u8]) {
        for (at, new) in (offset..).step_by(BLOCK as usize).zip(wanted.chunks(BLOCK as usize)) {
            let mut there = vec![0xAA; BLOCK as usize];
            ram.read_at(at, &mut there).unwrap();
            let old = &mut self.0[Self::range(at, BLOCK)];
            assert!(there == *old || there == *new, "byte {at}: neither old nor new");
            old.copy_from_slice(&there);
        }
    }

    /// Compares every byte of the disk with the expected content.
    #[track_caller]
    pub fn check(&self, ram: &Ram) {
        const STEP: usize = 128 << 10;
        let mut there = vec![0xAA; STEP];
        for (offset, wanted) in (0..).step_by(STEP).zip(self.0.chunks(STEP)) {
            let there = &mut there[..wanted.len()];
            ram.read_at(offset, there).unwrap();
            if let Some(wrong) = first_difference(there, wanted) {
                panic!(
                    "page {}, byte {}: wrong content",
                    (offset + wrong as u64) / PAGE,
                    offset + wrong as u64
                );
            }
        }
    }
}
