//! The memory of a family (devices that share a memory pool): its pages, the layers that refer to
//! them, and the limits of both.
//!
//! The room owns the family's pool, layers, ages of pages and retired layers. It knows no device: the
//! rooms of evictions, recompression and devices use it.
//!
//! Lock order: see [`Pages`](pages::Pages).

pub(in crate::ram) mod ages;
pub(in crate::ram) mod config;
pub(in crate::ram) mod freeing;
pub(in crate::ram) mod groups;
pub(in crate::ram) mod layer;
pub(in crate::ram) mod limits;
pub(in crate::ram) mod outcome;
pub(in crate::ram) mod page_search;
pub(in crate::ram) mod pages;
pub(in crate::ram) mod read;
pub(in crate::ram) mod record;
pub(in crate::ram) mod retiring;
pub(in crate::ram) mod shared;
mod space_watch;
