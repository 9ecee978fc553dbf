//! Devices that have their size before they are opened here.

use freestone::device::Geometry;

use crate::refusal::{Errno, Refusal};
use crate::size::exact;

/// Refuses another size than the one that was asked for; `what` is what has it.
pub(super) fn check_size(asked: Option<u64>, found: &Geometry, what: &str) -> Result<(), Refusal> {
    let size = found.size - u64::from(found.padding);
    let Some(asked) = asked.filter(|asked| *asked != size) else { return Ok(()) };
    let (asked, size) = (exact(asked), exact(size));
    let why = format!("size={asked}: the {what} has {size}; leave size out to take it as it is");
    Err(Refusal::failed(Errno::EIO, why))
}
