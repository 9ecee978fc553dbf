//! The operating system: files and their locks, Unix sockets, limits of the process, a coarse clock, rate-limited log
//! lines, random numbers.
//!
//! Every other room may use these modules. They use [`sync`](crate::sync) and one another, and know no
//! device and no request.

pub mod allow;
pub mod clock;
pub mod descriptor_reserve;
pub mod eventfd;
pub mod fail_points;
pub mod file_locks;
pub mod file_size_limit;
pub mod log_limit;
pub mod replace;
pub mod unique;
pub mod unix_socket;
