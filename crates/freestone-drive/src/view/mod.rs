//! Views of a device: read-only, or with other request limits.

mod read_only;
mod shaped;

pub use read_only::ReadOnly;
pub use shaped::Shaped;
