//! The content of a simulated disk: the durable bytes, and all unflushed versions of each sector.

use std::collections::BTreeMap;
use std::ops::Range;

use freestone_testkit::Rng;

use crate::oracle::SECTOR_BYTES;

type Bytes = Box<[u8; SECTOR_BYTES]>;

pub(super) struct Media {
    durable: Vec<u8>,
    /// Unflushed versions by sector number, oldest first. Reads return the last one.
    unflushed: BTreeMap<u64, Vec<Bytes>>,
    /// For each sector, true if it takes up space (is not a hole).
    used: Vec<bool>,
    /// The disk has a volatile cache: writes without FUA stay in `unflushed` until a flush.
    volatile_cache: bool,
}

impl Media {
    pub fn new(durable: Vec<u8>, volatile_cache: bool) -> Self {
        let used = durable.chunks(SECTOR_BYTES).map(|sector| sector.iter().any(|&byte| byte != 0)).collect();
        Self { durable, unflushed: BTreeMap::new(), used, volatile_cache }
    }

    pub fn len(&self) -> u64 {
        self.durable.len() as u64
    }

    pub fn grow(&mut self, size: usize) {
        if size > self.durable.len() {
            self.durable.resize(size, 0);
            self.used.resize(size / SECTOR_BYTES, false);
        }
    }

    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let first = offset / SECTOR_BYTES as u64;
        for (at, out) in (first..).zip(out.chunks_mut(SECTOR_BYTES)) {
            match self.unflushed.get(&at).and_then(|versions| versions.last()) {
                Some(bytes) => out.copy_from_slice(&bytes[..]),
                None => out.copy_from_slice(&self.durable[bytes_of(at)]),
            }
        }
    }

    /// Writes one sector; `None` discards the sector, which then reads as zeroes and takes up no
    /// space.
    pub fn write(&mut self, at: u64, bytes: Option<&[u8]>, fua: bool) {
        const ZEROES: &[u8] = &[0; SECTOR_BYTES];
        self.used[at as usize] = bytes.is_some();
        let bytes = bytes.unwrap_or(ZEROES);
        if fua || !self.volatile_cache {
            self.unflushed.remove(&at);
            self.durable[bytes_of(at)].copy_from_slice(bytes);
        } else {
            let bytes = Box::new(bytes.try_into().expect("a sector"));
            self.unflushed.entry(at).or_default().push(bytes);
        }
    }

    pub fn flush(&mut self) {
        for (at, versions) in std::mem::take(&mut self.unflushed) {
            if let Some(last) = versions.last() {
                self.durable[bytes_of(at)].copy_from_slice(&last[..]);
            }
        }
    }

    /// Makes a random half of the unflushed sectors durable, like a flush that fails midway.
    pub fn flush_some(&mut self, rng: &mut Rng) {
        let some: Vec<u64> = self.unflushed.keys().copied().filter(|_| rng.chance(50)).collect();
        for at in some {
            if let Some(last) = self.unflushed.remove(&at).and_then(|mut versions| versions.pop()) {
                self.durable[bytes_of(at)].copy_from_slice(&last[..]);
            }
        }
    }

    /// Sets each sector to its durable content or to one of its unflushed versions, at random.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        for (at, versions) in std::mem::take(&mut self.unflushed) {
            let chosen = rng.below(versions.len() as u64 + 1) as usize;
            if chosen > 0 {
                self.durable[bytes_of(at)].copy_from_slice(&versions[chosen - 1][..]);
            }
            self.used[at as usize] = true;
        }
    }

    pub fn visible(&self) -> Vec<u8> {
        let mut out = vec![0; self.durable.len()];
        self.read(0, &mut out);
        out
    }

    pub fn space_for(&self, sectors: Range<u64>) -> u64 {
        let new = sectors.filter(|&at| !self.used[at as usize]).count();
        (new * SECTOR_BYTES) as u64
    }

    pub fn is_used(&self, at: u64) -> bool {
        self.used[at as usize]
    }
}

fn bytes_of(sector: u64) -> Range<usize> {
    let start = sector as usize * SECTOR_BYTES;
    start..start + SECTOR_BYTES
}
