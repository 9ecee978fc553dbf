//! Extent queries: the data and holes that `lseek` reports.

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use freestone_core::device::{Error, Extent, ExtentKind, Result, range_end};

use super::backing::{Backing, error};

/// Maximum number of extents that one call reports; each costs one or two system calls.
const MAX_ROWS: u32 = 256;

impl Backing {
    /// Implements [`Device::extents`](freestone_core::device::Device::extents). A block device is
    /// reported as all data. Extents begin and end at block boundaries; a block that is partly data
    /// counts as data.
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = self.extents_end(offset, len)?;
        if self.is_block_device {
            row(Extent { offset, len, kind: ExtentKind::Data });
            return Ok(len);
        }
        // Reads beyond the real end of the file fail, so there are no extents to report.
        let block = u64::from(self.geometry().logical_block);
        let real = self.refresh()?;
        let end = end.min(if self.padded { real.next_multiple_of(block) } else { real });
        if end <= offset {
            return Err(Error::Media);
        }
        let mut at = offset;
        for _ in 0..MAX_ROWS {
            let (kind, next) = self.extent_at(at, end)?;
            let next = match kind {
                ExtentKind::Data => next.next_multiple_of(block),
                _ => next - next % block,
            };
            // A hole that ends within the first block is reported as data up to the block's end.
            let (kind, next) = if next > at {
                (kind, next.min(end))
            } else {
                (ExtentKind::Data, (at - at % block + block).min(end))
            };
            let more = row(Extent { offset: at, len: next - at, kind });
            at = next;
            if !more || at == end {
                break;
            }
        }
        Ok(at - offset)
    }

    fn extents_end(&self, offset: u64, len: u64) -> Result<u64> {
        if let Ok(end) = range_end(offset, len, self.geometry().size) {
            return Ok(end);
        }
        self.refresh()?;
        range_end(offset, len, self.geometry().size)
    }

    /// Returns the kind of the extent at byte `at`, and the end of the extent (at most `end`).
    fn extent_at(&self, at: u64, end: u64) -> Result<(ExtentKind, u64)> {
        match rustix::fs::seek(&self.fd, SeekFrom::Data(at)) {
            Ok(data) if data > at => Ok((ExtentKind::Hole, data.min(end))),
            Ok(_) => match rustix::fs::seek(&self.fd, SeekFrom::Hole(at)) {
                Ok(hole) => Ok((ExtentKind::Data, hole.clamp(at + 1, end.max(at + 1)))),
                // The file was truncated between the two system calls.
                Err(Errno::NXIO) => Err(Error::Media),
                Err(errno) => Err(error(errno)),
            },
            // The rest of the file is a hole.
            Err(Errno::NXIO) => Ok((ExtentKind::Hole, end)),
            // The file system does not support `SEEK_DATA`, so report all as data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((ExtentKind::Data, end)),
            Err(errno) => Err(error(errno)),
        }
    }
}
