//! Views of a device: read-only, or with a different geometry.

mod geometry_view;
mod read_only;

pub use geometry_view::GeometryView;
pub use read_only::ReadOnly;
