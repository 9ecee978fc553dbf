//! Applies the clusters of a qcow2 overlay to a device. The whole overlay is checked before the
//! first write.

use std::fs;
use std::path::Path;

use crate::qcow2::chain::{Chain, Layer, resolve_relative};
use crate::qcow2::reader::{Cursor, Fetch, Location};
use crate::qcow2::table::Table;
use freestone_core::device::{Blocking as _, Device, Flags, IoBuf};

use super::DeltaError;

/// Maximum number of bytes copied by one write.
const PIECE_BYTES: u64 = 1 << 20;
/// Maximum number of bytes zeroed by one request.
const ZERO_PIECE_BYTES: u64 = 256 << 20;

/// Totals of an applied overlay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApplyReport {
    /// Bytes of data written to the device.
    pub data_bytes: u64,
    /// Bytes of the device that were zeroed.
    pub zero_bytes: u64,
}

/// Writes the data of the overlay `from`, without its backing chain, to a device, and flushes the
/// device. The device should be an unchanged fork of the overlay's base. Bytes that the overlay
/// does not contain stay unchanged.
///
/// If `base` is given, the overlay must name that file as its backing file. `progress` receives the
/// bytes done and the total.
///
/// # Errors
/// Any [`DeltaError`] except those of [`save`](super::save). Only [`DeltaError::Apply`] leaves the
/// device changed.
pub fn apply(
    from: &Path,
    to: &dyn Device,
    base: Option<&Path>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ApplyReport, DeltaError> {
    apply_cancellable(from, to, base, &|| false, progress)
}

/// Applies an overlay like [`apply`], and stops if `cancelled` returns true. `cancelled` is called
/// between pieces, and must not return false after it has returned true.
///
/// # Errors
/// As [`apply`], and [`DeltaError::Cancelled`]: the device keeps the pieces already written.
pub fn apply_cancellable(
    from: &Path,
    to: &dyn Device,
    base: Option<&Path>,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ApplyReport, DeltaError> {
    let check_cancelled = || if cancelled() { Err(DeltaError::Cancelled) } else { Ok(()) };
    let chain = Chain::open_top(from)?;
    let [layer] = chain.layers.as_slice() else { return Err(foreign(from, "it is empty")) };
    let Some(table) = &layer.table else { return Err(foreign(from, "it is a raw file")) };
    check_device(from, to, table, layer.size)?;
    check_base(from, table, base)?;
    if table.header.is_corrupt {
        return Err(damaged(from, "it is marked as corrupt; see qemu-img check"));
    }
    let all = check_clusters(from, &chain, layer, table, &check_cancelled)?;
    let total = all.data_bytes + all.zero_bytes;
    progress(0, total);
    let mut applied = ApplyReport::default();
    let mut buffer =
        IoBuf::zeroed(PIECE_BYTES as usize).map_err(|error| DeltaError::Apply { at: 0, error })?;
    let mut cursor = Cursor::new(0, layer.size);
    while cursor.at < cursor.end {
        check_cancelled()?;
        let at = cursor.at;
        let failed = |error| DeltaError::Apply { at, error };
        let len = match chain.locate_blocking(&mut cursor).map_err(failed)? {
            Location::Nowhere => cursor.run(),
            Location::Zero { .. } => {
                let len = cursor.run().min(ZERO_PIECE_BYTES);
                to.write_zeroes(at, len, Flags::MAY_FREE).map_err(failed)?;
                applied.zero_bytes += len;
                len
            }
            _ => {
                let len = cursor.run().min(PIECE_BYTES);
                let data = &mut buffer[..len as usize];
                chain.read(at, data).map_err(failed)?;
                to.write_at(at, data, Flags::empty()).map_err(failed)?;
                applied.data_bytes += len;
                len
            }
        };
        cursor.pass(len);
        progress(applied.data_bytes + applied.zero_bytes, total);
    }
    to.flush().map_err(|error| DeltaError::Apply { at: layer.size, error })?;
    Ok(applied)
}

fn check_device(from: &Path, to: &dyn Device, table: &Table, size: u64) -> Result<(), DeltaError> {
    let geometry = to.geometry();
    if geometry.read_only {
        return Err(DeltaError::NotWritable("is read-only"));
    }
    if geometry.zones.is_some() {
        return Err(DeltaError::NotWritable("has zones"));
    }
    if size > geometry.size {
        let reason = format!("it has {size} bytes, the device {}", geometry.size);
        return Err(foreign(from, reason));
    }
    let (block, unit) = (u64::from(geometry.logical_block), table.header.unit_bytes());
    if !size.is_multiple_of(block) || !unit.is_multiple_of(block) {
        let reason =
            format!("its {size} bytes in clusters of {unit} do not fit the device's blocks of {block} bytes");
        return Err(foreign(from, reason));
    }
    Ok(())
}

fn check_base(from: &Path, table: &Table, base: Option<&Path>) -> Result<(), DeltaError> {
    let Some(name) = &table.header.backing else {
        return Err(foreign(from, "it has no backing file: the image stands alone"));
    };
    let Some(base) = base else { return Ok(()) };
    let named = resolve_relative(from, name);
    let same = match (fs::canonicalize(&named), fs::canonicalize(base)) {
        (Ok(named), Ok(base)) => named == base,
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(foreign(from, format!("its base is {}, the device's is {}", named.display(), base.display())))
}

/// Checks every table entry and decompresses every compressed cluster. Returns the totals of bytes
/// to apply.
fn check_clusters(
    from: &Path,
    chain: &Chain,
    layer: &Layer,
    table: &Table,
    check_cancelled: &dyn Fn() -> Result<(), DeltaError>,
) -> Result<ApplyReport, DeltaError> {
    let cluster = table.header.cluster_bytes();
    let mut used = UsedClusters::new(layer.source.len(), cluster);
    let l1 = table.header.l1_offset..table.header.l1_offset + table.header.l1_entries * 8;
    let mut is_valid = used.add(0, cluster) && used.add(l1.start, l1.end);
    for host in table.tables() {
        is_valid = is_valid && used.add(host, host.saturating_add(cluster));
    }
    if !is_valid {
        return Err(damaged(from, "its tables overlap or lie beyond the end of the file"));
    }
    let mut all = ApplyReport::default();
    let mut cursor = Cursor::new(0, layer.size);
    // Index of the last cluster with data, on the disk and in the file.
    let mut last = None;
    while cursor.at < cursor.end {
        let at = cursor.at;
        check_cancelled()?;
        let unreadable = |error| damaged(from, format!("its data for byte {at} cannot be read ({error})"));
        let found = chain.locate_blocking(&mut cursor).map_err(unreadable)?;
        let run = cursor.run();
        match found {
            Location::Zero { .. } => all.zero_bytes += run,
            Location::Data { host, .. } => {
                // Count whole clusters, even if the disk ends within one. As in qemu, only the last
                // cluster of the file may be short.
                let end = (host + run).next_multiple_of(cluster);
                // With subclusters, the previous run may already have added the cluster in which
                // this run begins.
                let cluster_of = |at: u64, host: u64| (at / cluster, host / cluster);
                let continues = last == Some(cluster_of(at, host)) && !at.is_multiple_of(cluster);
                let start = if continues { host.next_multiple_of(cluster) } else { host };
                last = Some(cluster_of(at + run - 1, host + run - 1));
                if host + run > layer.source.len() || !used.add(start, end) {
                    let what = format!("the data for byte {at} is truncated or overlaps other data");
                    return Err(damaged(from, what));
                }
                all.data_bytes += run;
            }
            Location::Cluster { layer, number, host, len } => {
                let need = Fetch::Cluster { layer, number, host, len };
                chain.perform(&mut cursor, need, at, &mut []).map_err(unreadable)?;
                all.data_bytes += run;
            }
            Location::Nowhere | Location::Fetch(_) => {}
        }
        cursor.pass(run);
    }
    Ok(all)
}

/// Bitmap of the clusters of the overlay file that are in use.
struct UsedClusters {
    bits: Vec<u64>,
    clusters: u64,
    cluster: u64,
}

impl UsedClusters {
    fn new(len: u64, cluster: u64) -> Self {
        let clusters = len.div_ceil(cluster);
        Self { bits: vec![0; clusters.div_ceil(64) as usize], clusters, cluster }
    }

    /// Marks a byte range of the file as used. Returns false if a part of the range is in use
    /// already or beyond the end of the file.
    fn add(&mut self, start: u64, end: u64) -> bool {
        let (first, last) = (start / self.cluster, end.div_ceil(self.cluster));
        if last > self.clusters {
            return false;
        }
        (first..last).all(|index| {
            let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
            let free = self.bits[word] & bit == 0;
            self.bits[word] |= bit;
            free
        })
    }
}

fn foreign(path: &Path, reason: impl Into<String>) -> DeltaError {
    DeltaError::Foreign { path: path.to_owned(), reason: reason.into() }
}

fn damaged(path: &Path, reason: impl Into<String>) -> DeltaError {
    DeltaError::Damaged { path: path.to_owned(), reason: reason.into() }
}
