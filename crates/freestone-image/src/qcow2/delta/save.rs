//! Saving of a device's changes as a new overlay, which then replaces an old one.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::qcow2::chain::{Chain, Format};
use crate::qcow2::header::{MAGIC, MAX_NAME_BYTES, RawHeader};
use freestone_core::device::{Blocking as _, Device, ExtentKind, IoBuf};
use freestone_core::replace::{DELTA_PREFIX, Durability, ReplaceCheck, ReplacePolicy, ReplaceTarget};

use super::runs::{Runs, for_each_extent};
use super::writer::{CLUSTER_BYTES, MAX_SIZE_BYTES, Writer};
use super::{DeltaError, Summary, for_each_change};

/// Number of clusters (64 KiB each) read at once.
const BATCH_CLUSTERS: u64 = 16;

/// Totals of a saved overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveReport {
    /// Totals of the device's changes.
    pub changes: Summary,
    /// Number of clusters (64 KiB each) saved with data.
    pub data_clusters: u64,
    /// Number of clusters (64 KiB each) saved as zero clusters.
    pub zero_clusters: u64,
    /// Length of the overlay file in bytes.
    pub file_bytes: u64,
}

/// Saves the changes of `device` as a qcow2 overlay on its base.
///
/// The overlay is written in the directory of `to` without a name. If the file system does not
/// support that, the file has a name that begins with `.freestone-delta-`, and a failed save
/// removes the file. The file is made durable and then renamed. So `to` is the old file or the new
/// one at any moment, even after a crash. An old file is replaced only if it is an overlay or
/// empty. The new file has mode 0600.
///
/// If base and overlay are in one directory, the overlay refers to the base by its file name, so
/// that both can be moved together. Otherwise the overlay contains the absolute path of the base.
/// `progress` receives the number of changed bytes done and the total.
///
/// # Errors
/// Any [`DeltaError`] except those of [`apply`](super::apply). The old file is kept. If only the
/// last step failed, which makes the new name durable, a crash may leave either file.
pub fn save(
    device: &dyn Device,
    base: &Path,
    base_format: Format,
    to: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SaveReport, DeltaError> {
    let options = Options { replace: ReplacePolicy::default(), cancelled: &|| false };
    save_with(device, base, base_format, to, &options, progress)
}

/// Options of [`save_with`].
pub struct Options<'a> {
    /// Condition for replacing an old file.
    pub replace: ReplacePolicy,
    /// Called between pieces of up to 1 MiB; the save stops if `cancelled` returns true. Once true,
    /// `cancelled` must stay true.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// Saves the changes of a device like [`save`], with options.
///
/// # Errors
/// As [`save`], and [`DeltaError::Cancelled`].
pub fn save_with(
    device: &dyn Device,
    base: &Path,
    base_format: Format,
    to: &Path,
    options: &Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SaveReport, DeltaError> {
    let check_cancelled = || if (options.cancelled)() { Err(DeltaError::Cancelled) } else { Ok(()) };
    let size = device.geometry().size;
    if size > MAX_SIZE_BYTES {
        return Err(DeltaError::DeviceSize { size, most: MAX_SIZE_BYTES });
    }
    let changes = for_each_change(device, &mut |_| !(options.cancelled)())?;
    check_cancelled()?;
    let place = ReplaceTarget::new(to).map_err(|source| DeltaError::Write { path: to.to_owned(), source })?;
    let name = base_name(base, base_format, &place)?;
    let failed = |source| DeltaError::Write { path: place.path.clone(), source };
    let may_go: ReplaceCheck = options.replace.check_for("qcow2 overlay", is_overlay);
    place.check(may_go).map_err(failed)?;
    let unfinished = place.begin(DELTA_PREFIX).map_err(failed)?;
    let saved = {
        let writer = Writer::new(unfinished.as_file(), size).map_err(failed)?;
        let path = &place.path;
        let mut job = SaveJob { device, size, writer, data_clusters: 0, zero_clusters: 0, path };
        job.run(changes.bytes, &check_cancelled, progress)?;
        let SaveJob { writer, data_clusters, zero_clusters, .. } = job;
        let file_bytes = writer.finish(name.as_bytes(), base_format).map_err(failed)?;
        SaveReport { changes, data_clusters, zero_clusters, file_bytes }
    };
    check_cancelled()?;
    place.put(unfinished, may_go).and_then(Durability::into_result).map_err(failed)?;
    Ok(saved)
}

struct SaveJob<'a> {
    device: &'a dyn Device,
    size: u64,
    writer: Writer<'a>,
    data_clusters: u64,
    zero_clusters: u64,
    path: &'a Path,
}

impl SaveJob<'_> {
    fn run(
        &mut self,
        total: u64,
        check_cancelled: &dyn Fn() -> Result<(), DeltaError>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), DeltaError> {
        let mut buffer = IoBuf::zeroed((BATCH_CLUSTERS * CLUSTER_BYTES) as usize)
            .map_err(|error| DeltaError::Read { at: 0, error })?;
        // Number of the first cluster that is not saved yet. Two changed ranges may share a
        // cluster.
        let mut next = 0;
        let mut done = 0;
        progress(0, total);
        let mut runs = Runs::of(self.device)?;
        while let Some(run) = runs.next()? {
            let end = run.end.div_ceil(CLUSTER_BYTES);
            next = next.max(run.start / CLUSTER_BYTES);
            let mut passed = run.start;
            while next < end {
                let batch = next..end.min(next + BATCH_CLUSTERS);
                next = batch.end;
                check_cancelled()?;
                self.batch(batch, &mut buffer)?;
                let now = run.end.min(next * CLUSTER_BYTES);
                done += now - passed;
                passed = now;
                // A device in use may now report more changes than were counted before.
                progress(done.min(total), total);
            }
            done += run.end - passed;
        }
        progress(total, total);
        Ok(())
    }

    fn batch(&mut self, clusters: std::ops::Range<u64>, buffer: &mut [u8]) -> Result<(), DeltaError> {
        let start = clusters.start * CLUSTER_BYTES;
        let end = self.size.min(clusters.end * CLUSTER_BYTES);
        let mut has_data = [false; BATCH_CLUSTERS as usize];
        for_each_extent(self.device, start, end, &mut |extent| {
            if extent.kind == ExtentKind::Data {
                let first = (extent.offset - start) / CLUSTER_BYTES;
                let last = (extent.offset - start + extent.len - 1) / CLUSTER_BYTES;
                has_data[first as usize..=last as usize].fill(true);
            }
            true
        })?;
        // A single read covers all clusters from the first to the last with data.
        let data = has_data.iter().position(|&data| data).zip(has_data.iter().rposition(|&data| data));
        if let Some((first, last)) = data {
            let from = start + first as u64 * CLUSTER_BYTES;
            let to = end.min(start + (last as u64 + 1) * CLUSTER_BYTES);
            let part = &mut buffer[(from - start) as usize..(to - start) as usize];
            self.device.read_at(from, part).map_err(|error| DeltaError::Read { at: from, error })?;
        }
        for (index, cluster) in clusters.enumerate() {
            let from = index * CLUSTER_BYTES as usize;
            let to = (from + CLUSTER_BYTES as usize).min((end - start) as usize);
            let content = &buffer[from..to];
            let written = if has_data[index] && content.iter().any(|&byte| byte != 0) {
                self.data_clusters += 1;
                self.writer.data(cluster, content)
            } else {
                self.zero_clusters += 1;
                self.writer.zero(cluster)
            };
            written.map_err(|source| DeltaError::Write { path: self.path.to_owned(), source })?;
        }
        Ok(())
    }
}

/// Returns true if a file begins like a qcow2 image with a backing file.
fn is_overlay(head: &[u8]) -> bool {
    let backing_file_offset = offset_of!(RawHeader, backing_file_offset);
    head.starts_with(&MAGIC.to_be_bytes())
        && head.get(backing_file_offset..).is_some_and(|rest| rest.len() >= 8 && rest[..8] != [0; 8])
}

/// Returns the name by which the overlay refers to its base; fails if the base or its backing chain
/// contains the overlay itself.
fn base_name(base: &Path, format: Format, to: &ReplaceTarget) -> Result<OsString, DeltaError> {
    let refuse = |reason: String| DeltaError::Base { path: base.to_owned(), reason };
    let path = fs::canonicalize(base).map_err(|error| refuse(error.to_string()))?;
    let below = match format {
        Format::Raw => vec![path.clone()],
        Format::Qcow2 => Chain::open(&path, false)?.paths().collect(),
    };
    for file in below {
        if fs::canonicalize(&file).is_ok_and(|file| file == to.path) {
            return Err(refuse("the delta would take the place of the base".to_owned()));
        }
    }
    let name = match path.file_name() {
        Some(name) if path.parent() == Some(&to.dir) => {
            // The prefix `./` keeps qemu from interpreting the part before the colon as a protocol
            // name.
            let colon = name.as_bytes().contains(&b':');
            if colon { Path::new(".").join(name).into_os_string() } else { name.to_owned() }
        }
        _ => path.clone().into_os_string(),
    };
    check_name(&name).map_err(refuse)?;
    Ok(name)
}

fn check_name(name: &OsStr) -> Result<(), String> {
    let len = name.len() as u64;
    if len > MAX_NAME_BYTES {
        return Err(format!("its name has {len} bytes; at most {MAX_NAME_BYTES} are possible"));
    }
    Ok(())
}
