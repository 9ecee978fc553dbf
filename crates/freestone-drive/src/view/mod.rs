//! Devices that show another device differently: read-only, or with other limits of requests.

mod read_only;
mod shaped;

pub use read_only::ReadOnly;
pub use shaped::Shaped;
