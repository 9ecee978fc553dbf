//! Sequential writing of a qcow2 overlay: data clusters and L2 tables in disk order, then the L1
//! table and the refcounts, and the header last. Every cluster of the file is used once, so every
//! refcount is 1.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;

use zerocopy::IntoBytes as _;

use freestone_core::zeroes::{ZEROES, ZEROES_BYTES};

use crate::qcow2::chain::Format;
use crate::qcow2::header::{EXTENSION_BACKING_FORMAT, MAGIC, MAX_L1_BYTES, RawHeader, V3_BYTES};
use crate::qcow2::table::{COPIED, ZERO};

/// Cluster size of a saved delta, as a power of two: 64 KiB.
const CLUSTER_BITS: u32 = 16;
pub(super) const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
/// Number of entries in an L2 table, which is one cluster.
const L2_ENTRIES: u64 = CLUSTER_BYTES / 8;
/// Number of refcounts (16 bits each) in a refcount block, which is one cluster.
const REFCOUNTS: u64 = CLUSTER_BYTES / 2;
/// Size of a refcount in bits, as a power of two: 16 bits.
const REFCOUNT_ORDER: u32 = 4;
/// Size of the header in bytes, including the field for the compression type.
const HEADER_BYTES: u32 = V3_BYTES + 8;
/// Size of the largest disk that the L1 table can describe, in bytes.
pub(super) const MAX_SIZE_BYTES: u64 = MAX_L1_BYTES / 8 * L2_ENTRIES * CLUSTER_BYTES;
const BUFFER_BYTES: usize = 1 << 20;

const _: () = assert!(CLUSTER_BYTES as usize == ZEROES_BYTES, "ZEROES must fill a cluster");

pub(super) struct Writer<'a> {
    file: &'a File,
    out: BufWriter<&'a File>,
    /// Number of clusters written, including that of the header.
    clusters: u64,
    size: u64,
    l1: Vec<u64>,
    /// The current L2 table, and the index of this table in the L1 table.
    l2: Vec<u64>,
    table: Option<u64>,
}

impl<'a> Writer<'a> {
    /// Starts an overlay in an empty file, for a disk of `size` bytes (at most [`MAX_SIZE_BYTES`]).
    pub fn new(file: &'a File, size: u64) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
        // Reserve the cluster of the header. Until the magic number is written, the file is not a
        // valid image.
        out.write_all(&ZEROES.0)?;
        let l1 = vec![0; size.div_ceil(L2_ENTRIES * CLUSTER_BYTES) as usize];
        Ok(Self { file, out, clusters: 1, size, l1, l2: vec![0; L2_ENTRIES as usize], table: None })
    }

    /// Adds a zero cluster. Clusters must be added in ascending order, each at most once.
    pub fn zero(&mut self, cluster: u64) -> io::Result<()> {
        self.set_entry(cluster, ZERO)
    }

    /// Adds a data cluster; the last cluster of the disk may be short.
    pub fn data(&mut self, cluster: u64, data: &[u8]) -> io::Result<()> {
        let at = self.append(data)?;
        self.set_entry(cluster, at | COPIED)
    }

    fn set_entry(&mut self, cluster: u64, entry: u64) -> io::Result<()> {
        let table = cluster / L2_ENTRIES;
        if self.table != Some(table) {
            self.write_table()?;
            self.table = Some(table);
        }
        self.l2[(cluster % L2_ENTRIES) as usize] = entry;
        Ok(())
    }

    fn write_table(&mut self) -> io::Result<()> {
        if let Some(table) = self.table.take() {
            let bytes: Vec<u8> = self.l2.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            self.l1[table as usize] = self.append(&bytes)? | COPIED;
            self.l2.fill(0);
        }
        Ok(())
    }

    /// Writes whole clusters, padded with zeroes. Returns the offset of the first byte in the file.
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        let at = self.clusters * CLUSTER_BYTES;
        self.out.write_all(bytes)?;
        let padded = (bytes.len() as u64).next_multiple_of(CLUSTER_BYTES);
        self.out.write_all(&ZEROES.0[..padded as usize - bytes.len()])?;
        self.clusters += padded / CLUSTER_BYTES;
        Ok(at)
    }

    /// Writes the rest of the metadata. Returns the length of the file in bytes. The file is not
    /// durable yet.
    pub fn finish(mut self, backing: &[u8], format: Format) -> io::Result<u64> {
        self.write_table()?;
        let l1: Vec<u8> = self.l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let l1_at = self.append(&l1)?;
        let (blocks, table_clusters) = refcount_clusters(self.clusters);
        let total = self.clusters + blocks + table_clusters;
        let first_block = self.clusters;
        for block in 0..blocks {
            let used = (total - block * REFCOUNTS).min(REFCOUNTS);
            let counts: Vec<u8> = (0..used).flat_map(|_| 1_u16.to_be_bytes()).collect();
            self.append(&counts)?;
        }
        let table: Vec<u8> =
            (0..blocks).flat_map(|block| ((first_block + block) * CLUSTER_BYTES).to_be_bytes()).collect();
        let table_at = self.append(&table)?;
        self.out.flush()?;
        let header = self.header(l1_at, table_at, table_clusters, backing, format);
        self.file.write_all_at(&header, 0)?;
        Ok(total * CLUSTER_BYTES)
    }

    fn header(&self, l1: u64, refcounts: u64, clusters: u64, backing: &[u8], format: Format) -> Vec<u8> {
        let format = format.name().as_bytes();
        let extension_bytes = 8 + format.len().next_multiple_of(8);
        // The name follows the end marker of the header extensions.
        let name_at = HEADER_BYTES as usize + extension_bytes + 8;
        let raw = RawHeader {
            magic: MAGIC.into(),
            version: 3.into(),
            backing_file_offset: (name_at as u64).into(),
            backing_file_size: (backing.len() as u32).into(),
            cluster_bits: CLUSTER_BITS.into(),
            size: self.size.into(),
            l1_size: (self.l1.len() as u32).into(),
            l1_table_offset: l1.into(),
            refcount_table_offset: refcounts.into(),
            refcount_table_clusters: (clusters as u32).into(),
            refcount_order: REFCOUNT_ORDER.into(),
            header_length: HEADER_BYTES.into(),
            ..RawHeader::default()
        };
        let mut header = raw.as_bytes().to_vec();
        // Compression type 0 (deflate), with padding.
        header.resize(HEADER_BYTES as usize, 0);
        header.extend(EXTENSION_BACKING_FORMAT.to_be_bytes());
        header.extend((format.len() as u32).to_be_bytes());
        header.extend(format);
        header.resize(name_at, 0);
        header.extend(backing);
        header
    }
}

/// Returns the numbers of clusters of refcount blocks and of the refcount table, for a file with
/// `others` other clusters.
fn refcount_clusters(others: u64) -> (u64, u64) {
    let (mut blocks, mut table) = (1, 1);
    loop {
        let wanted = (others + blocks + table).div_ceil(REFCOUNTS);
        let clusters = (wanted * 8).div_ceil(CLUSTER_BYTES);
        if (wanted, clusters) == (blocks, table) {
            return (blocks, table);
        }
        (blocks, table) = (wanted, clusters);
    }
}

#[cfg(test)]
mod tests {
    use super::{REFCOUNTS, refcount_clusters};

    /// Refcount blocks count themselves, too. Around each size that requires one more block,
    /// exactly the required number is used.
    #[test]
    fn refcount_blocks_cover_themselves() {
        for full in [1, 2, 3, 8192, 8193] {
            for others in full * REFCOUNTS - 6..full * REFCOUNTS + 3 {
                let (blocks, table) = refcount_clusters(others);
                let total = others + blocks + table;
                assert!(blocks * REFCOUNTS >= total && (blocks - 1) * REFCOUNTS < total, "{others}");
                assert_eq!(table, blocks.div_ceil(8192), "{others}");
            }
        }
    }
}
