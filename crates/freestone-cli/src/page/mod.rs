//! Read-only web page that shows devices, families, maps and latencies. All its files are part of the
//! program.

mod api;
mod args;
mod device;
mod files;
mod map;
mod overview;
mod site;

pub use args::PageArgs;
pub use site::PageSite;
