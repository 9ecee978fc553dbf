//! A page for people who watch the server with a browser: read-only, and all of it within the
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
