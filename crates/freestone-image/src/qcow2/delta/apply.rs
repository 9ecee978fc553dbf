//! Applying: the clusters that an overlay has itself, onto a device. The whole overlay is checked
//! before the first write.

use std::fs;
use std::path::Path;

use crate::qcow2::chain::{Chain, Layer, beside};
use crate::qcow2::reader::{Cursor, Found, Need};
use crate::qcow2::table::Table;
use freestone_core::device::{Blocking as _, Device, Flags, IoBuf};

use super::DeltaError;

/// Most bytes that are copied at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Most bytes that are zeroed at once.
const ZERO_PIECE_BYTES: u64 = 256 << 20;

/// A delta that was applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Bytes of data that were written.
    pub data_bytes: u64,
    /// Bytes that were zeroed.
    pub zero_bytes: u64,
}

/// Writes what the overlay `from` has itself to a device, which should be a fork of the same base
/// with no changes of its own: what the overlay does not have is left as it is. Ends with a flush.
///
/// With `base`, the overlay must name that file as its backing file. `progress` gets bytes done and
/// in all.
///
/// # Errors
/// [`DeltaError`]: all but the ones of [`save`](super::save). Only [`DeltaError::Apply`] leaves the
/// device changed.
pub fn apply(
    from: &Path,
    to: &dyn Device,
    base: Option<&Path>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Applied, DeltaError> {
    apply_unless(from, to, base, &|| false, progress)
}

/// As [`apply`]; `cancelled` is asked between pieces: whether to stop. Once true, it stays true.
///
/// # Errors
/// As [`apply`], and [`DeltaError::Cancelled`]: the device holds what came before.
pub fn apply_unless(
    from: &Path,
    to: &dyn Device,
    base: Option<&Path>,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Applied, DeltaError> {
    let go_on = || if cancelled() { Err(DeltaError::Cancelled) } else { Ok(()) };
    let chain = Chain::open_top(from)?;
    let [layer] = chain.layers.as_slice() else { return Err(foreign(from, "it is empty")) };
    let Some(table) = &layer.table else { return Err(foreign(from, "it is a raw file")) };
    check_device(from, to, table, layer.size)?;
    check_base(from, table, base)?;
    if table.header.is_corrupt {
        return Err(damaged(from, "it is marked as corrupt; see qemu-img check"));
    }
    let all = check_clusters(from, &chain, layer, table, &go_on)?;
    let total = all.data_bytes + all.zero_bytes;
    progress(0, total);
    let mut applied = Applied::default();
    let mut buffer =
        IoBuf::zeroed(PIECE_BYTES as usize).map_err(|error| DeltaError::Apply { at: 0, error })?;
    let mut cursor = Cursor::new(0, layer.size);
    while cursor.at < cursor.end {
        go_on()?;
        let at = cursor.at;
        let failed = |error| DeltaError::Apply { at, error };
        let len = match chain.locate_waiting(&mut cursor).map_err(failed)? {
            Found::Nowhere => cursor.run(),
            Found::Zero { .. } => {
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
        return Err(foreign(from, "it has no backing file: it is an image that stands alone"));
    };
    let Some(base) = base else { return Ok(()) };
    let named = beside(from, name);
    let same = match (fs::canonicalize(&named), fs::canonicalize(base)) {
        (Ok(named), Ok(base)) => named == base,
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(foreign(from, format!("its base is {}, the device's is {}", named.display(), base.display())))
}

/// Looks at every entry, and unpacks what is compressed. Returns what there is to be applied.
fn check_clusters(
    from: &Path,
    chain: &Chain,
    layer: &Layer,
    table: &Table,
    go_on: &dyn Fn() -> Result<(), DeltaError>,
) -> Result<Applied, DeltaError> {
    let cluster = table.header.cluster_bytes();
    let mut seen = Seen::new(layer.source.len(), cluster);
    let l1 = table.header.l1_offset..table.header.l1_offset + table.header.l1_entries * 8;
    let mut sound = seen.add(0, cluster) && seen.add(l1.start, l1.end);
    for host in table.tables() {
        sound = sound && seen.add(host, host.saturating_add(cluster));
    }
    if !sound {
        return Err(damaged(from, "its tables overlap or lie behind the end of the file"));
    }
    let mut all = Applied::default();
    let mut cursor = Cursor::new(0, layer.size);
    // Numbers of the last cluster with data, on the disk and in the file.
    let mut last = None;
    while cursor.at < cursor.end {
        let at = cursor.at;
        go_on()?;
        let unreadable = |error| damaged(from, format!("what it has for byte {at} cannot be read ({error})"));
        let found = chain.locate_waiting(&mut cursor).map_err(unreadable)?;
        let run = cursor.run();
        match found {
            Found::Zero { .. } => all.zero_bytes += run,
            Found::Data { host, .. } => {
                // Whole clusters, also where the disk ends within one: but for the last, as in
                // qemu.
                let end = (host + run).next_multiple_of(cluster);
                // Of a cluster that is described by parts, some were added with the part before.
                let cluster_of = |at: u64, host: u64| (at / cluster, host / cluster);
                let continues = last == Some(cluster_of(at, host)) && !at.is_multiple_of(cluster);
                let start = if continues { host.next_multiple_of(cluster) } else { host };
                last = Some(cluster_of(at + run - 1, host + run - 1));
                if host + run > layer.source.len() || !seen.add(start, end) {
                    let what = format!("the data for byte {at} is cut off or has two places");
                    return Err(damaged(from, what));
                }
                all.data_bytes += run;
            }
            Found::Cluster { layer, number, host, len } => {
                let need = Need::Cluster { layer, number, host, len };
                chain.wait(&mut cursor, need, at, &mut []).map_err(unreadable)?;
                all.data_bytes += run;
            }
            Found::Nowhere | Found::Need(_) => {}
        }
        cursor.pass(run);
    }
    Ok(all)
}

/// Clusters of the file that have a user: one bit each.
struct Seen {
    bits: Vec<u64>,
    clusters: u64,
    cluster: u64,
}

impl Seen {
    fn new(len: u64, cluster: u64) -> Self {
        let clusters = len.div_ceil(cluster);
        Self { bits: vec![0; clusters.div_ceil(64) as usize], clusters, cluster }
    }

    /// False where a byte has a user already, or lies behind the end.
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
