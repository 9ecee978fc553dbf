//! Generates the requests of a virtio-blk driver from an input.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | size of the queue (3 bits), event index, indirect descriptors, read-only, zones, two regions |
//! | 1 | I/O mode of the device (3 bits), a bad block, inflight area, notifications to the driver, notifications to the queue only on request, the memory is truncated at the end |
//! | 2 | initial ring indexes (2 bits), without flushes, the queue is stopped between batches, completions are dropped; seed (one value: inflight area of another server) |
//! | then, for each request | type (low 4 bits), kind of sector (2 bits), end of the batch; layout; sector (2 bytes); length; defect |
//!
//! Numbers are mapped to values near limits. Most requests have no defect. A batch is published at once, and each of
//! its requests has its own part of the memory.

use freestone_testkit::Manner;

use super::device::{DiskConfig, SIZE, ZONE};
use super::driver::{self, DESC, Driver, MEMORY_BYTES, SLOTS, USED, guest};
use super::wire::{
    ALWAYS, CONFIG_WCE, DISCARD, DISCARD_AND_ZEROES, EVENT_IDX, FLUSH, FLUSHES, GET_ID, IN, INDIRECT, NEXT,
    OUT, RO, TABLE, WRITE, WRITE_ZEROES, ZONE_APPEND, ZONE_CLOSE, ZONE_FINISH, ZONE_OPEN, ZONE_REPORT,
    ZONE_RESET, ZONE_RESET_ALL, ZONED,
};

pub const BATCH: usize = 8;
/// Maximum number of requests of an input, so that its check takes less than a millisecond.
const MOST: usize = 24;
/// Size in bytes of the part of the guest memory for one request.
const SLOT_BYTES: u64 = 0x3000;
/// Offset of the indirect descriptor table in the part of a request.
const TABLE_AT: u64 = 0x100;
/// Offset of the status byte in the part of a request.
const STATUS_AT: u64 = 0x800;
/// Offset of the sector that a zone append returns, in the part of a request.
const SECTOR_AT: u64 = 0x900;
/// Offset of the data in the part of a request.
const DATA_AT: u64 = 0x1000;
/// Maximum size in bytes of the data in the part of a request.
const DATA_BYTES: u32 = 0x2000;

const KINDS: [u32; 16] = [
    IN,
    IN,
    OUT,
    OUT,
    FLUSHES,
    GET_ID,
    DISCARD,
    WRITE_ZEROES,
    ZONE_APPEND,
    ZONE_REPORT,
    ZONE_OPEN,
    ZONE_CLOSE,
    ZONE_FINISH,
    ZONE_RESET,
    ZONE_RESET_ALL,
    99,
];
/// Data lengths in bytes that inputs select instead of the valid ones.
const LENGTHS: [u32; 16] =
    [0, 1, 8, 15, 17, 20, 63, 64, 127, 511, 513, 4095, 64 << 10, 33 << 20, u32::MAX - 511, u32::MAX];

/// Session of a driver that is generated from an input.
#[derive(Debug)]
pub struct Script {
    pub driver: driver::QueueConfig,
    pub disk: DiskConfig,
    pub read_only: bool,
    /// True if the queue is stopped and started again between batches.
    pub stops: bool,
    /// True if the guest memory is truncated at the end of the session.
    pub cuts: bool,
    pub requests: Vec<Raw>,
}

/// A request as the input encodes it.
#[derive(Debug, Clone, Copy)]
pub struct Raw {
    tag: u8,
    layout: u8,
    place: u16,
    len: u8,
    defect: u8,
}

/// How a chain is made available to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// The chain that starts at this descriptor.
    Chain(u16),
    /// The chain that starts at this descriptor, with a published index that implies more chains than the
    /// queue can hold.
    TooMuch(u16),
}

/// A descriptor: guest address, length in bytes, flags.
type Entry = (u64, u32, u16);

impl Script {
    /// Generates the session of an input. Returns None if the input is too short.
    pub fn new(input: &[u8]) -> Option<Self> {
        let (&[rings, kind, more], rest) = input.split_first_chunk()?;
        let zoned = rings & 64 != 0;
        let read_only = rings & 32 != 0;
        let mut features = ALWAYS & !(EVENT_IDX | INDIRECT);
        for (bit, feature) in [(8, EVENT_IDX), (16, INDIRECT)] {
            features |= if rings & bit != 0 { feature } else { 0 };
        }
        features |= match (zoned, read_only) {
            (true, _) => ZONED,
            (false, true) => 0,
            (false, false) => DISCARD_AND_ZEROES,
        };
        features |= if read_only { RO } else { 0 };
        if !zoned && more & 4 == 0 {
            features |= FLUSH | CONFIG_WCE;
        }
        let manner = match kind & 7 {
            0 | 1 => Manner::Inline,
            2 => Manner::Partly(1536),
            3 => Manner::Submitted,
            4 | 5 => Manner::Held,
            6 => Manner::Mixed(512),
            _ => Manner::Mixed(2048),
        };
        let has_inflight = kind & 16 != 0;
        let base = [0, 5, 0xfffc, 0xffff][usize::from(more & 3)];
        let driver = driver::QueueConfig {
            size: 1 << (rings & 7).min(6),
            features,
            base,
            // The entries of an inflight area refer to used indexes, so both rings then start at the same
            // index.
            used: if has_inflight { base } else { base.wrapping_mul(3) },
            two_regions: rings & 128 != 0,
            has_inflight,
            inherited: (has_inflight && more >> 5 == 7)
                .then(|| rest.iter().map(|byte| u64::from(*byte)).sum()),
            notified: kind & 32 != 0,
            kicks_if_requested: kind & 64 != 0,
        };
        let bad = (kind & 8 != 0).then_some(SIZE / 2 + 100);
        let disk = DiskConfig { manner, zoned, bad, forgets: more & 16 != 0, seed: u64::from(more >> 5) };
        let requests = rest.chunks_exact(6).take(MOST).map(|raw| Raw {
            tag: raw[0],
            layout: raw[1],
            place: u16::from_le_bytes([raw[2], raw[3]]),
            len: raw[4],
            defect: raw[5],
        });
        Some(Self {
            driver,
            disk,
            read_only,
            stops: more & 8 != 0,
            cuts: kind & 128 != 0,
            requests: requests.collect(),
        })
    }
}

impl Raw {
    /// Returns true if the batch ends after this request.
    pub fn ends_batch(self) -> bool {
        self.tag & 64 != 0
    }

    fn kind(self) -> u32 {
        match KINDS[usize::from(self.tag & 15)] {
            99 => u32::from(self.place),
            kind => kind,
        }
    }

    fn sector(self) -> u64 {
        let n = u64::from(self.place);
        match self.tag >> 4 & 3 {
            0 => n % (SIZE / 512),
            1 => (n % 8) * (ZONE / 512),
            2 => (SIZE / 512).wrapping_sub(n & 0xff),
            _ => n << 48 | n,
        }
    }

    /// Returns the length of the readable and of the writable data, in bytes.
    fn data(self) -> (u32, u32) {
        let n = u32::from(self.len);
        let odd = (n >= 0xc0).then(|| LENGTHS[(n & 15) as usize]);
        match self.kind() {
            OUT => (odd.unwrap_or(n % 16 * 512), 0),
            DISCARD | WRITE_ZEROES => (odd.unwrap_or(16), 0),
            ZONE_APPEND => (odd.unwrap_or(n % 3 * 4096), 0),
            ZONE_REPORT => (0, odd.unwrap_or(64 + n % 6 * 64)),
            GET_ID => (0, odd.unwrap_or(20)),
            IN => (0, odd.unwrap_or(n % 16 * 512)),
            _ => (odd.unwrap_or(0), 0),
        }
    }

    /// Writes the request to part `slot` of the memory and to descriptors from `first` on. Returns the number of used
    /// descriptors and how to offer the chain, or None if the ring has too few descriptors.
    pub fn put(
        self,
        driver: &mut Driver,
        shape: &driver::QueueConfig,
        slot: usize,
        first: u16,
    ) -> Option<(u16, Offer)> {
        let base = SLOTS + slot as u64 * SLOT_BYTES;
        let entries = self.entries(driver, base);
        let (defect, size) = (self.defect(), shape.size);
        let wants_table = shape.features & INDIRECT != 0 && self.layout & 16 != 0;
        let in_table = wants_table || (12..=15).contains(&defect);
        let needed = if in_table { 1 } else { entries.len() as u16 };
        if first + needed > size {
            return None;
        }
        // The descriptors of the chain are in ascending or descending order in the table.
        let count = entries.len() as u16;
        let place = |i: u16| {
            let i = if self.layout & 64 != 0 && !in_table { count - 1 - i } else { i };
            if in_table { i } else { first + i }
        };
        let at =
            |i: u16| if in_table { base + TABLE_AT + u64::from(i) * 16 } else { DESC + u64::from(i) * 16 };
        for (i, &(addr, len, flags)) in (0..).zip(&entries) {
            let last = i + 1 == count;
            let (mut flags, mut next) = (flags, if last { 0 } else { place(i + 1) });
            flags |= if last { 0 } else { NEXT };
            match defect {
                10 if i == 0 => next = size,
                11 if last => (flags, next) = (flags | NEXT, place(0)),
                16 if i == 1 => flags |= TABLE,
                _ => {}
            }
            driver.put(at(place(i)), &entry(addr, len, flags, next));
        }
        let head = if in_table { first } else { place(0) };
        if in_table {
            let (mut addr, mut len, mut flags) = (guest(base + TABLE_AT), u32::from(count) * 16, TABLE);
            match defect {
                12 => flags |= NEXT,
                13 => len -= 1,
                14 => len = if self.len & 1 == 0 { 0 } else { 1025 * 16 },
                15 => addr = guest(MEMORY_BYTES) - 16,
                _ => {}
            }
            driver.put(DESC + u64::from(first) * 16, &entry(addr, len, flags, 0));
        }
        self.poke(driver, base, head);
        let offer = match defect {
            17 => Offer::Chain(size),
            18 => Offer::TooMuch(head),
            _ => Offer::Chain(head),
        };
        Some((needed, offer))
    }

    /// Returns the number of the defect, or 0 if the request has no defect.
    fn defect(self) -> u8 {
        if self.defect < 0xa0 { 0 } else { self.defect % 26 }
    }

    /// If the defect selects it, writes two arbitrary bytes to a descriptor, to the indirect table, or to the
    /// header and data.
    fn poke(self, driver: &mut Driver, base: u64, head: u16) {
        let n = u64::from(self.place);
        let at = match self.defect() {
            22 => DESC + u64::from(head) * 16 + n % 15,
            23 => base + TABLE_AT + n % 255,
            24 => base + DATA_AT - 16 + n % 48,
            _ => return,
        };
        driver.put(at, &[self.len, self.len ^ self.layout]);
    }

    /// Writes the header, the data and the status byte of the request. Returns the descriptors of the chain.
    fn entries(self, driver: &mut Driver, base: u64) -> Vec<Entry> {
        let (kind, defect) = (self.kind(), self.defect());
        let (given, wanted) = self.data();
        // The data directly follows the 16-byte header, so one descriptor can contain both.
        let header = base + DATA_AT - 16;
        let request_header = [&kind.to_le_bytes()[..], &[0; 4], &self.sector().to_le_bytes()].concat();
        driver.put(header, &request_header);
        driver.put(base + STATUS_AT, &[0xff]);
        self.fill(driver, base, given);
        let mut readable = vec![(guest(header), 16)];
        if self.layout & 4 != 0 {
            readable = vec![(guest(header), 3), (guest(header) + 3, 13)];
        }
        if self.layout & 8 != 0 && given > 0 {
            readable.last_mut().expect("there is one").1 += given.min(DATA_BYTES);
        } else {
            self.cut(&mut readable, base, given);
        }
        let mut writable = Vec::new();
        self.cut(&mut writable, base, wanted);
        if kind == ZONE_APPEND {
            let room = if self.layout & 128 != 0 { u32::from(self.layout & 15) } else { 8 };
            writable.push((guest(base + SECTOR_AT), room));
        }
        match writable.last_mut() {
            Some((_, len)) if self.layout & 8 != 0 && *len <= DATA_BYTES => *len += 1,
            _ => writable.push((guest(base + STATUS_AT), 1)),
        }
        match defect {
            1 => readable[0].1 -= 1,
            2 => writable[0].0 = 0,
            3 => writable[0].0 = u64::MAX - 7,
            4 => writable[0].0 = guest(MEMORY_BYTES) - 100,
            5 => readable[0].0 = 0,
            6 => readable.last_mut().expect("there is one").0 = guest(MEMORY_BYTES) - 100,
            7 => writable.last_mut().expect("there is one").0 = guest(MEMORY_BYTES),
            8 => writable.clear(),
            9 => writable[0].1 = u32::MAX,
            20 => writable[0].0 = guest(USED) + u64::from(self.place % 128),
            21 => writable[0].0 = guest(DESC) + u64::from(self.place % 128),
            25 => writable[0].0 = guest(SLOTS + u64::from(self.place % 0x4000)),
            _ => {}
        }
        let readable = readable.into_iter().map(|(addr, len)| (addr, len, 0));
        let writable = writable.into_iter().map(|(addr, len)| (addr, len, WRITE));
        let mut entries: Vec<Entry> = readable.chain(writable).collect();
        if self.layout & 32 != 0 {
            let (addr, _, flags) = entries[entries.len() / 2];
            entries.insert(entries.len() / 2, (addr, 0, flags));
        }
        if defect == 19 {
            // Readable descriptors after writable ones are invalid.
            entries.reverse();
        }
        entries
    }

    /// Writes the readable data of the request: the range of a discard or write zeroes, or different bytes in
    /// each block.
    fn fill(self, driver: &mut Driver, base: u64, given: u32) {
        let mut data = vec![0; given.min(DATA_BYTES) as usize];
        if matches!(self.kind(), DISCARD | WRITE_ZEROES) {
            let (sectors, flags) = match self.len {
                0..128 => (u32::from(self.len % 16), 0),
                128..160 => (u32::from(self.len % 16), u32::from(self.len >> 3 & 3)),
                _ => ((1 << 30) - 1 + u32::from(self.len & 3), 0),
            };
            let range =
                [&self.sector().to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat();
            for (to, from) in data.iter_mut().zip(range) {
                *to = from;
            }
        } else {
            for (block, out) in (0_u8..).zip(data.chunks_mut(512)) {
                out.fill(
                    (self.place as u8).wrapping_mul(89) ^ self.layout.wrapping_add(block.wrapping_mul(31)),
                );
            }
        }
        driver.put(base + DATA_AT, &data);
    }

    /// Adds `len` bytes of data to `pieces`, split into as many pieces as the layout selects.
    fn cut(self, pieces: &mut Vec<(u64, u32)>, base: u64, len: u32) {
        if len > 0 {
            let count = u64::from(self.layout & 3) + 1;
            let edge = |i| i * u64::from(len) / count;
            for i in 0..count {
                pieces.push((guest(base + DATA_AT) + edge(i), (edge(i + 1) - edge(i)) as u32));
            }
        }
    }
}

fn entry(addr: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
    [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

/// Reads the first bytes of the device with a valid request, and asserts that they are zeroes.
pub fn well_behaved(driver: &mut Driver) {
    const LEN: u32 = 4096;
    let old = driver.next;
    let (header, status, data) = (SLOTS, SLOTS + 16, SLOTS + DATA_AT);
    driver.put(header, &[0; 16]);
    driver.put(data, &[0xee; LEN as usize]);
    driver.put(status, &[0xff]);
    driver.put(DESC, &entry(guest(header), 16, NEXT, 1));
    driver.put(DESC + 16, &entry(guest(data), LEN, NEXT | WRITE, 2));
    driver.put(DESC + 32, &entry(guest(status), 1, WRITE, 0));
    driver.offer(0);
    driver.publish(old, driver.next, 1, false);
    let memory = driver.read_memory();
    assert_eq!(driver.used(&memory), (0, LEN + 1), "a read is answered");
    assert_eq!(memory[status as usize], 0, "a read is done");
    assert!(memory[data as usize..][..LEN as usize].iter().all(|byte| *byte == 0), "with its data");
}
