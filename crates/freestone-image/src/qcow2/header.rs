//! The header of a qcow2 image, as in qemu's `docs/interop/qcow2.txt`. All numbers are big-endian.
//!
//! ```text
//!   0 magic "QFI\xfb"          32 crypt_method              72 incompatible features   (from here on: version 3)
//!   4 version                  36 l1_size (entries)         80 compatible features
//!   8 backing_file_offset      40 l1_table_offset           88 autoclear features
//!  16 backing_file_size        48 refcount_table_offset     96 refcount_order
//!  20 cluster_bits             56 refcount_table_clusters  100 header_length
//!  24 size (bytes)             60 nb_snapshots             104 compression_type (1 byte, where header_length allows)
//!                              64 snapshots_offset
//! header_length: extensions {type: u32, length: u32, data padded to 8 bytes}, ended by type 0; the backing file's name
//! ```

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::block_options::{self, BackingName};
use super::error::Fault;

/// Name of the backing file field in errors.
const BACKING: &str = "backing file";
pub(super) const MAGIC: u32 = 0x5146_49fb;
/// Length of a version 2 header in bytes, without extensions.
const V2_BYTES: u32 = 72;
pub(super) const V3_BYTES: u32 = 104;
/// Supported cluster sizes as powers of two: 512 bytes to 2 MiB, as in qemu.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Number of subclusters per cluster with extended L2 entries.
pub(super) const SUBCLUSTERS: u64 = 32;
/// Size of the smallest subcluster in bytes.
const SECTOR_BYTES: u64 = 512;
/// Longest name of a backing file in bytes, as in qemu.
pub(super) const MAX_NAME_BYTES: u64 = 1023;
/// Size of the largest L1 table in bytes, as in qemu.
pub(super) const MAX_L1_BYTES: u64 = 32 << 20;
/// Maximum number of header extensions that are parsed; qemu defines only five.
const MAX_EXTENSIONS: usize = 64;

/// The refcounts of the image may be inconsistent, which does not affect reads.
const INCOMPATIBLE_DIRTY: u64 = 1;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
const INCOMPATIBLE_KNOWN: u64 = INCOMPATIBLE_DIRTY
    | INCOMPATIBLE_CORRUPT
    | INCOMPATIBLE_DATA_FILE
    | INCOMPATIBLE_COMPRESSION
    | INCOMPATIBLE_EXTENDED_L2;

const EXTENSION_END: u32 = 0;
pub(super) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// Size in bytes of one row of the feature name table: type, bit number, name.
const FEATURE_NAME_BYTES: usize = 48;

/// Size of the largest disk in bytes: the largest signed file offset.
const MAX_DISK_BYTES: u64 = i64::MAX as u64;

#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(super) struct RawHeader {
    pub magic: U32,
    pub version: U32,
    pub backing_file_offset: U64,
    pub backing_file_size: U32,
    pub cluster_bits: U32,
    pub size: U64,
    pub crypt_method: U32,
    pub l1_size: U32,
    pub l1_table_offset: U64,
    pub refcount_table_offset: U64,
    pub refcount_table_clusters: U32,
    pub nb_snapshots: U32,
    pub snapshots_offset: U64,
    pub incompatible: U64,
    pub compatible: U64,
    pub autoclear: U64,
    pub refcount_order: U32,
    pub header_length: U32,
}

const _: () = assert!(size_of::<RawHeader>() == V3_BYTES as usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Deflate,
    Zstd,
}

#[derive(Debug, Clone)]
pub(super) struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    /// Size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// Number of L1 entries that the disk needs; the L1 table may have more.
    pub l1_entries: u64,
    pub l1_offset: u64,
    pub compression: Compression,
    /// Size of an L2 entry in bytes: 8, or 16 with a subcluster bitmap.
    pub entry_bytes: u64,
    pub backing: Option<PathBuf>,
    pub backing_format: Option<String>,
    /// True if the image stores its clusters in an external data file.
    pub has_data_file: bool,
    pub data_file: Option<PathBuf>,
    /// True if qemu has marked the image as corrupt.
    pub is_corrupt: bool,
}

/// Returns the cluster size in bytes, given the first bytes of a file. Fails if the file is not a
/// qcow2 image of a supported version.
pub(super) fn cluster_bytes(head: &[u8]) -> Result<u64, Fault> {
    let (raw, _) = RawHeader::read_from_prefix(head).map_err(|_| Fault::NotQcow2)?;
    if raw.magic.get() != MAGIC {
        return Err(Fault::NotQcow2);
    }
    if !(2..=3).contains(&raw.version.get()) {
        return Err(Fault::Version(raw.version.get()));
    }
    let bits = raw.cluster_bits.get();
    if !CLUSTER_BITS.contains(&bits) {
        return Err(corrupt(format!("clusters of 2^{bits} bytes; 512 bytes to 2 MiB are possible")));
    }
    Ok(1 << bits)
}

impl Header {
    /// Parses and verifies a header. `head` is the first cluster, or the whole file if it is
    /// shorter.
    pub fn parse(head: &[u8]) -> Result<Self, Fault> {
        let cluster = cluster_bytes(head)?;
        let (mut raw, _) = RawHeader::read_from_prefix(head).map_err(|_| Fault::NotQcow2)?;
        if raw.version.get() == 2 {
            // A version 2 header does not have these fields; other data follows it.
            let v2 = RawHeader { refcount_order: 4.into(), header_length: V2_BYTES.into(), ..raw };
            raw = RawHeader { incompatible: 0.into(), compatible: 0.into(), autoclear: 0.into(), ..v2 };
        } else if !(V3_BYTES..=cluster as u32).contains(&raw.header_length.get()) {
            return Err(corrupt(format!("its header has {} bytes", raw.header_length)));
        }
        match raw.crypt_method.get() {
            0 => {}
            1 => return Err(Fault::Encrypted("AES")),
            2 => return Err(Fault::Encrypted("LUKS")),
            _ => return Err(Fault::Encrypted("by an unknown method")),
        }
        // Parse the extensions before any field that an unknown feature may redefine, since they
        // contain the names of the features for the error.
        let extensions = Extensions::parse(head, &raw, cluster)?;
        let incompatible = raw.incompatible.get();
        if incompatible & !INCOMPATIBLE_KNOWN != 0 {
            return Err(Fault::Features(extensions.names(incompatible & !INCOMPATIBLE_KNOWN)));
        }
        let subclusters = incompatible & INCOMPATIBLE_EXTENDED_L2 != 0;
        if subclusters && cluster < SUBCLUSTERS * SECTOR_BYTES {
            return Err(corrupt(format!("subclusters in clusters of {cluster} bytes")));
        }
        if raw.refcount_order.get() > 6 {
            return Err(corrupt(format!("refcounts of 2^{} bits", raw.refcount_order)));
        }
        let compression = compression(head, &raw)?;
        let entry_bytes = if subclusters { 16 } else { 8 };
        let (size, l1_entries) = size(&raw, cluster, entry_bytes)?;
        let has_data_file = incompatible & INCOMPATIBLE_DATA_FILE != 0;
        let named = backing(head, &raw, cluster)?;
        Ok(Self {
            version: raw.version.get(),
            cluster_bits: raw.cluster_bits.get(),
            size,
            l1_entries,
            l1_offset: raw.l1_table_offset.get(),
            compression,
            entry_bytes,
            backing: named.as_ref().map(|named| named.path.clone()),
            backing_format: named.and_then(|named| named.format).or(extensions.backing_format),
            has_data_file,
            data_file: extensions.data_file.filter(|_| has_data_file),
            is_corrupt: incompatible & INCOMPATIBLE_CORRUPT != 0,
        })
    }

    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns true if L2 entries have subcluster bitmaps (extended L2 entries).
    pub const fn has_subclusters(&self) -> bool {
        self.entry_bytes == 16
    }

    /// Returns the size in bytes of the unit that one L2 entry or subcluster bit describes: a
    /// cluster or a subcluster.
    pub fn unit_bytes(&self) -> u64 {
        if self.has_subclusters() { self.cluster_bytes() / SUBCLUSTERS } else { self.cluster_bytes() }
    }
}

fn compression(head: &[u8], raw: &RawHeader) -> Result<Compression, Fault> {
    let declared = raw.incompatible.get() & INCOMPATIBLE_COMPRESSION != 0;
    let kind = if raw.header_length.get() > V3_BYTES {
        head.get(V3_BYTES as usize).copied().unwrap_or(0)
    } else {
        0
    };
    match (kind, declared) {
        (0, false) => Ok(Compression::Deflate),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => Err(corrupt("the compression type and its feature bit contradict each other")),
        (other, _) => Err(Fault::Compression(other)),
    }
}

/// Returns the size of the disk in bytes, and the number of L1 entries that the disk needs.
fn size(raw: &RawHeader, cluster: u64, entry_bytes: u64) -> Result<(u64, u64), Fault> {
    let declared = raw.size.get();
    let size = declared - declared % 512;
    if size == 0 {
        return Err(Fault::Empty);
    }
    if declared > MAX_DISK_BYTES {
        return Err(Fault::TooLarge(declared));
    }
    // An L2 table is one cluster of entries. The product is at most 2^21 * 2^18 bytes, so it cannot
    // overflow.
    let l1_entries = declared.div_ceil(cluster * (cluster / entry_bytes));
    if l1_entries * 8 > MAX_L1_BYTES {
        return Err(Fault::TooLarge(declared));
    }
    if u64::from(raw.l1_size.get()) < l1_entries {
        return Err(corrupt(format!("its L1 table has {} entries, {l1_entries} are needed", raw.l1_size)));
    }
    let offset = raw.l1_table_offset.get();
    if offset == 0 || !offset.is_multiple_of(cluster) || offset > MAX_DISK_BYTES - MAX_L1_BYTES {
        return Err(corrupt(format!("its L1 table begins at byte {offset}")));
    }
    Ok((size, l1_entries))
}

fn backing(head: &[u8], raw: &RawHeader, cluster: u64) -> Result<Option<BackingName>, Fault> {
    let offset = raw.backing_file_offset.get();
    if offset == 0 {
        return Ok(None);
    }
    let len = u64::from(raw.backing_file_size.get());
    let found = (offset < cluster && (1..=MAX_NAME_BYTES).contains(&len))
        .then(|| head.get(offset as usize..(offset + len) as usize))
        .flatten()
        .ok_or_else(|| corrupt(format!("the name of its backing file has {len} bytes from byte {offset}")))?;
    match found.strip_prefix(b"json:") {
        Some(options) => block_options::parse(options)
            .map(Some)
            .ok_or_else(|| Fault::Name { what: BACKING, name: String::from_utf8_lossy(found).into_owned() }),
        None => Ok(Some(BackingName { path: name(BACKING, found)?, format: None })),
    }
}

/// Parses the name of a local file, with or without the prefix `file:` that qemu allows.
fn name(what: &'static str, found: &[u8]) -> Result<PathBuf, Fault> {
    let refuse = || Fault::Name { what, name: String::from_utf8_lossy(found).into_owned() };
    // Some programs pad the name with zero bytes.
    let text = found.split(|&b| b == 0).next().unwrap_or_default();
    let path = text.strip_prefix(b"file:").unwrap_or(text);
    // As in qemu, a colon before the first slash marks a protocol name.
    let first = path.split(|&b| b == b'/').next().unwrap_or_default();
    if path.is_empty() || (path.len() == text.len() && first.contains(&b':')) {
        return Err(refuse());
    }
    Ok(PathBuf::from(OsStr::from_bytes(path)))
}

#[derive(Debug, Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<PathBuf>,
    /// Bit number and name of each incompatible feature that the image defines.
    features: Vec<(u8, String)>,
}

impl Extensions {
    fn parse(head: &[u8], raw: &RawHeader, cluster: u64) -> Result<Self, Fault> {
        let mut found = Self::default();
        // As in qemu, extensions end at the name of the backing file.
        let end = match raw.backing_file_offset.get() {
            0 => cluster,
            offset => offset.min(cluster),
        };
        let area = &head[..head.len().min(end as usize)];
        let mut at = raw.header_length.get() as usize;
        for _ in 0..MAX_EXTENSIONS {
            let Some(([kind, len], _)) =
                area.get(at..).and_then(|rest| <[U32; 2]>::read_from_prefix(rest).ok())
            else {
                return Ok(found);
            };
            if kind.get() == EXTENSION_END {
                return Ok(found);
            }
            let data = at + 8;
            let Some(body) = area.get(data..).and_then(|rest| rest.get(..len.get() as usize)) else {
                return Err(corrupt(format!("a header extension of {len} bytes at byte {at}")));
            };
            found.take(kind.get(), body)?;
            at = data + body.len().next_multiple_of(8);
        }
        Err(corrupt(format!("more than {MAX_EXTENSIONS} header extensions")))
    }

    fn take(&mut self, kind: u32, body: &[u8]) -> Result<(), Fault> {
        match kind {
            EXTENSION_BACKING_FORMAT => {
                self.backing_format = Some(String::from_utf8_lossy(body).into_owned());
            }
            EXTENSION_DATA_FILE => self.data_file = Some(name("data file", body)?),
            EXTENSION_FEATURE_NAMES => {
                for row in body.chunks_exact(FEATURE_NAME_BYTES).filter(|row| row[0] == 0) {
                    let text = row[2..].split(|&b| b == 0).next().unwrap_or_default();
                    self.features.push((row[1], String::from_utf8_lossy(text).into_owned()));
                }
            }
            // Bitmaps, full disk encryption and unknown extensions do not affect reads.
            _ => {}
        }
        Ok(())
    }

    /// Returns the names of the features `bits`; a feature that the image does not name is given by
    /// its bit number.
    fn names(&self, bits: u64) -> String {
        let one = |bit: u8| match self.features.iter().find(|(named, _)| *named == bit) {
            Some((_, name)) => format!("{name} (bit {bit})"),
            None => format!("bit {bit}"),
        };
        let all: Vec<_> = (0..64).filter(|bit| bits >> bit & 1 == 1).map(one).collect();
        all.join(", ")
    }
}

fn corrupt(what: impl Into<String>) -> Fault {
    Fault::Corrupt(what.into())
}
