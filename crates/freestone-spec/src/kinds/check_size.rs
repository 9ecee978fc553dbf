//! Checks the expected size of a remote device.

use freestone::device::Geometry;

use crate::refusal::Refusal;
use crate::size::exact;

/// Checks that a device has the `expected` size in bytes. `None` accepts any size. `noun` names the
/// device in the message.
pub(super) fn check_size(expected: Option<u64>, found: &Geometry, noun: &str) -> Result<(), Refusal> {
    let size = found.size - u64::from(found.padding);
    let Some(expected) = expected.filter(|expected| *expected != size) else { return Ok(()) };
    let (expected, size) = (exact(expected), exact(size));
    refuse!(EIO, "size={expected}: the {noun} has {size}; leave size out to take it as it is")
}
