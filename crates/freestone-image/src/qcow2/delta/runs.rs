//! Iteration over the changed ranges and the extents of a device, which reports a limited number of
//! them per call.

use std::collections::VecDeque;
use std::ops::Range;

use freestone_core::device::{Changes, Device, Error, Extent};

use super::DeltaError;

/// Maximum number of ranges requested from the device at once.
const MAX_ROWS: usize = 1024;

/// Iterator over the changed ranges of a device, in ascending order, each as long as possible.
pub(super) struct Runs<'a> {
    changes: &'a dyn Changes,
    at: u64,
    size: u64,
    found: VecDeque<Range<u64>>,
}

impl<'a> Runs<'a> {
    pub fn of(device: &'a dyn Device) -> Result<Self, DeltaError> {
        let changes = device.changes().ok_or(DeltaError::NoChanges)?;
        Ok(Self { changes, at: 0, size: device.geometry().size, found: VecDeque::new() })
    }

    pub fn next(&mut self) -> Result<Option<Range<u64>>, DeltaError> {
        // Fetch until two ranges are known: the last known range may continue in the next rows.
        while self.found.len() < 2 && self.at < self.size {
            self.fetch_rows()?;
        }
        Ok(self.found.pop_front())
    }

    fn fetch_rows(&mut self) -> Result<(), DeltaError> {
        let (from, found) = (self.at, &mut self.found);
        let mut rows = 0;
        let described = self.changes.changes(from, self.size - from, &mut |row| {
            if row.own {
                let end = row.offset + row.len;
                match found.back_mut() {
                    Some(last) if last.end == row.offset => last.end = end,
                    _ => found.push_back(row.offset..end),
                }
            }
            rows += 1;
            rows < MAX_ROWS
        });
        match described {
            Ok(0) => Err(DeltaError::Read { at: from, error: Error::Media }),
            Ok(described) => {
                self.at += described;
                Ok(())
            }
            Err(error) => Err(DeltaError::Read { at: from, error }),
        }
    }
}

/// Calls `row` for the extents from byte `start` to `end` of a device, until `row` returns false.
pub(super) fn for_each_extent(
    device: &dyn Device,
    start: u64,
    end: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> Result<(), DeltaError> {
    let mut at = start;
    let mut more = true;
    while more && at < end {
        let described = device.extents(at, end - at, &mut |extent| {
            more = row(extent);
            more
        });
        match described {
            Ok(0) => return Err(DeltaError::Read { at, error: Error::Media }),
            Ok(described) => at += described,
            Err(error) => return Err(DeltaError::Read { at, error }),
        }
    }
    Ok(())
}
