//! Read-only web page that shows devices, families (bases and their forks, which share memory), maps and
//! latencies. The files of the page are included in the program.

mod api;
mod args;
mod device;
mod files;
mod map;
mod overview;
mod site;

pub use args::PageArgs;
pub use site::PageSite;
