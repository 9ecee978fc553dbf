//! Cluster mapping of one image: the L1 table, cached slices of the L2 tables, and the decoding of
//! L2 entries.

use std::sync::Arc;

use freestone_core::device;

use super::cache::Cache;
use super::error::Damage;
use super::header::{Header, SUBCLUSTERS};
use super::source::Source;

/// Size in bytes of one slice of an L2 table, the unit of reading and caching. With clusters below
/// this size, a slice is a whole table.
const SLICE_BYTES: u64 = 4096;
/// Maximum number of bytes of L2 slices cached per image: enough for a disk of 128 GiB with 64 KiB
/// clusters.
const MAX_SLICES_BYTES: u64 = 16 << 20;
/// Maximum number of bytes of decompressed clusters cached per image.
const MAX_UNPACKED_BYTES: u64 = 16 << 20;

const L1_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L2_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag of an entry whose cluster has refcount 1. With a data file, the flag also marks offset 0 as
/// allocated.
pub(super) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Flag of an L2 entry whose cluster reads as zeroes, whether it is allocated or not.
pub(super) const ZERO: u64 = 1;

pub(super) struct Table {
    pub header: Header,
    l1: Box<[u64]>,
    slice_bytes: u64,
    slices: Cache<[u64]>,
    /// Cache of decompressed clusters, by cluster number on the disk.
    pub unpacked: Cache<[u8]>,
}

/// Decoded L2 entry of a cluster or subcluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// Not allocated: the backing file contains the data.
    Absent,
    /// Reads as zeroes. `allocated` is true if the cluster has space in the file.
    Zero { allocated: bool },
    /// Data at byte `host` of the file.
    Data { host: u64 },
    /// Compressed data of at most `len` bytes, from byte `host` of the file on.
    Compressed { host: u64, len: u64 },
}

/// A slice of an L2 table: the index of the slice on the virtual disk, and its offset in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SliceAt {
    pub number: u64,
    pub host: u64,
}

impl Table {
    /// Reads the L1 table. Blocks. Returns `None` if the table is beyond the end of the file.
    pub fn load(header: Header, source: &Source) -> device::Result<Option<Self>> {
        let len = header.l1_entries * 8;
        // Check the offset before memory is allocated for the table.
        if header.l1_offset + len > source.len() {
            return Ok(None);
        }
        let mut bytes = vec![0; len as usize];
        source.read(header.l1_offset, &mut bytes)?;
        let cluster = header.cluster_bytes();
        let slice_bytes = SLICE_BYTES.min(cluster);
        let slices = header.size.div_ceil(slice_bytes / header.entry_bytes * cluster);
        let clusters = header.size.div_ceil(cluster);
        Ok(Some(Self {
            l1: numbers(&bytes).into(),
            slices: Cache::new(slices, MAX_SLICES_BYTES / slice_bytes),
            unpacked: Cache::new(clusters, MAX_UNPACKED_BYTES / cluster),
            slice_bytes,
            header,
        }))
    }

    /// Returns the slice with the entry for byte `at` of the disk, or `None` if the L2 table is not
    /// allocated. Also returns the first byte that another slice or table describes.
    pub fn slice_at(&self, at: u64) -> Result<(Option<SliceAt>, u64), Damage> {
        let cluster = self.header.cluster_bytes();
        let covered = self.slice_covers();
        let (number, per_table) = (at / covered, cluster / self.slice_bytes);
        let index = number / per_table;
        let entry = self.l1.get(index as usize).copied().unwrap_or_default();
        let host = entry & L1_OFFSET;
        if host == 0 {
            return Ok((None, (index + 1) * per_table * covered));
        }
        if !host.is_multiple_of(cluster) {
            return Err(Damage::L1Entry { index, entry });
        }
        let host = host + number % per_table * self.slice_bytes;
        Ok((Some(SliceAt { number, host }), (number + 1) * covered))
    }

    /// Returns the number of bytes of the disk that a slice describes.
    fn slice_covers(&self) -> u64 {
        self.slice_bytes / self.header.entry_bytes * self.header.cluster_bytes()
    }

    /// Returns the offset in the file of each allocated L2 table.
    pub fn tables(&self) -> impl Iterator<Item = u64> {
        self.l1.iter().map(|entry| entry & L1_OFFSET).filter(|&host| host != 0)
    }

    /// Returns the size of a slice in bytes.
    pub fn slice_bytes(&self) -> usize {
        self.slice_bytes as usize
    }

    pub fn cached_slice(&self, slice: SliceAt) -> Option<Arc<[u64]>> {
        self.slices.get(slice.number)
    }

    /// Decodes and caches a slice that was read from the file.
    pub fn cache_slice(&self, slice: SliceAt, bytes: &[u8]) -> Arc<[u64]> {
        let slice_of = Arc::from(numbers(bytes));
        self.slices.put(slice.number, Arc::clone(&slice_of));
        slice_of
    }

    /// Decodes the entry for byte `at`. Also returns the number of bytes from there on that have
    /// the same kind and contiguous places, at most `most` and within this slice.
    pub fn entry(&self, slice: &[u64], at: u64, most: u64) -> Result<(Entry, u64), Damage> {
        let (cluster, unit) = (self.header.cluster_bytes(), self.header.unit_bytes());
        let within = at % unit;
        let first = self.decode(slice, at - within)?;
        let mut len = unit - within;
        if let Entry::Compressed { .. } = first {
            len = cluster - at % cluster;
        } else {
            let end = (at / self.slice_covers() + 1) * self.slice_covers();
            while len < most && at + len < end {
                // Damage of the next entry is reported when that entry itself is located.
                let Ok(next) = self.decode(slice, at + len) else { break };
                let expected = match first {
                    Entry::Data { host } => Entry::Data { host: host + within + len },
                    other => other,
                };
                if next != expected {
                    break;
                }
                len += unit;
            }
        }
        let first = match first {
            Entry::Data { host } => Entry::Data { host: host + within },
            other => other,
        };
        Ok((first, len.min(most)))
    }

    /// Decodes the entry of the cluster or subcluster that begins at byte `at` of the disk.
    fn decode(&self, slice: &[u64], at: u64) -> Result<Entry, Damage> {
        let header = &self.header;
        let cluster = header.cluster_bytes();
        let words = (header.entry_bytes / 8) as usize;
        let index = (at % self.slice_covers() / cluster) as usize * words;
        let Some(&[entry, ref rest @ ..]) = slice.get(index..index + words) else {
            return Err(Damage::L2Entry(0));
        };
        let bad = Damage::L2Entry(entry);
        let bits = header.cluster_bits;
        if entry & COMPRESSED != 0 {
            if header.has_data_file {
                return Err(bad);
            }
            let shift = 62 - (bits - 8);
            let host = entry & ((1 << shift) - 1);
            let sectors = (entry & (COMPRESSED - 1)) >> shift;
            return Ok(Entry::Compressed { host, len: (sectors + 1) * 512 - host % 512 });
        }
        let host = entry & L2_OFFSET;
        let is_allocated = host != 0 || (header.has_data_file && entry & COPIED != 0);
        let (start, within) = (at - at % cluster, at % cluster);
        if is_allocated
            && entry & ZERO == 0
            && (!host.is_multiple_of(cluster) || (header.has_data_file && host != start))
        {
            return Err(bad);
        }
        let Some(&subclusters) = rest.first() else {
            return match entry & ZERO {
                0 if is_allocated => Ok(Entry::Data { host: host + within }),
                0 => Ok(Entry::Absent),
                // Version 2 does not define zero clusters; a reader of version 2 would interpret
                // the bit differently.
                _ if header.version < 3 => Err(bad),
                _ => Ok(Entry::Zero { allocated: is_allocated }),
            };
        };
        let number = within / header.unit_bytes();
        let is = |bit: u64| subclusters >> bit & 1 == 1;
        match (is(number), is(number + SUBCLUSTERS)) {
            // With extended entries, a zero cluster is marked only by the subcluster bits.
            _ if entry & ZERO != 0 => Err(bad),
            (true, false) if is_allocated => Ok(Entry::Data { host: host + within }),
            (true, _) => Err(Damage::Subclusters { entry, subclusters }),
            (false, true) => Ok(Entry::Zero { allocated: is_allocated }),
            (false, false) => Ok(Entry::Absent),
        }
    }
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&bytes| u64::from_be_bytes(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::header::Compression;
    use super::*;

    const CLUSTER: u64 = 64 << 10;

    /// Returns a table for a disk of three clusters, whose L2 table is not read.
    fn table(version: u32, has_data_file: bool) -> Table {
        let header = Header {
            version,
            cluster_bits: CLUSTER.ilog2(),
            size: 3 * CLUSTER,
            l1_entries: 1,
            l1_offset: CLUSTER,
            compression: Compression::Deflate,
            entry_bytes: 8,
            backing: None,
            backing_format: None,
            has_data_file,
            data_file: None,
            is_corrupt: false,
        };
        Table {
            l1: Box::new([0]),
            slice_bytes: SLICE_BYTES,
            slices: Cache::new(1, 1),
            unpacked: Cache::new(3, 1),
            header,
        }
    }

    /// Offset 0 is a cluster of the data file if bit 63 (`COPIED`) is set, even for a preallocated
    /// zero cluster.
    #[test]
    fn data_file_cluster_at_offset_0_is_allocated() {
        let slice = [COPIED | ZERO, COPIED | CLUSTER | ZERO, ZERO];
        let decode = |table: &Table, slice: &[u64]| {
            [0, 1, 2].map(|cluster| table.decode(slice, cluster * CLUSTER).ok())
        };
        let zero = |allocated| Some(Entry::Zero { allocated });
        assert_eq!(decode(&table(3, true), &slice), [zero(true), zero(true), zero(false)]);
        assert_eq!(decode(&table(3, false), &slice), [zero(false), zero(true), zero(false)]);
        assert_eq!(decode(&table(2, false), &slice), [None; 3]);
        let data = |host| Some(Entry::Data { host });
        let slice = [COPIED, COPIED | CLUSTER, 0];
        assert_eq!(decode(&table(3, true), &slice), [data(0), data(CLUSTER), Some(Entry::Absent)]);
        // In a data file, each cluster must be at the same offset as on the disk.
        let slice = [COPIED | CLUSTER, COPIED, COPIED | CLUSTER];
        assert_eq!(decode(&table(3, true), &slice), [None; 3]);
        assert_eq!(decode(&table(3, false), &slice), [data(CLUSTER), Some(Entry::Absent), data(CLUSTER)]);
    }
}
