//! On-disk format of a store. docs/object-storage.md has an overview.
//!
//! ```text
//! tags/NAME -> manifests/HASH -> for each GiB of the image, its maps/HASH from the oldest to the youngest
//!                                 -> chunks/HH/HASH: 128 pages, in compressed units of 16
//! ```
//!
//! The names of manifests, maps, page hashes and chunks are keyed hashes of their content. So these objects
//! never change, and readers verify them by their names.

pub mod bitmap;
pub mod chunk;
pub mod domain;
pub mod manifest;
pub mod map;
pub mod meta;
pub mod name;
mod part;
pub mod seal;
pub mod tag;

use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Size of a page in bytes.
pub const PAGE: usize = 4096;
/// Pages of a unit, which is compressed by itself and can be read by itself.
pub const UNIT_PAGES: usize = 16;
/// Maximum number of pages of a chunk.
pub const CHUNK_PAGES: usize = 128;
/// Size of the pages of a chunk in bytes.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE;
/// Pages of a segment (1 GiB), the part of an image with its own maps.
pub const SEGMENT_PAGES: usize = 1 << 18;
/// Size of a segment in bytes.
pub const SEGMENT_BYTES: u64 = (SEGMENT_PAGES * PAGE) as u64;
/// Maximum number of chunks of a segment.
pub const SEGMENT_CHUNKS: usize = SEGMENT_PAGES / CHUNK_PAGES;
/// Largest image in bytes, the same as for a fork.
pub const IMAGE_BYTES_MAX: u64 = 256 << 40;
/// Version of the format that this program writes and reads.
pub const VERSION: u32 = 2;

/// Reason why JSON cannot be read.
enum Unread {
    /// The JSON has this other version.
    Other(u32),
    /// The JSON is invalid; the text says why.
    Wrong(String),
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(format) => {
                write!(f, "it has format {format}, and this program knows format {VERSION}")
            }
            Self::Wrong(why) => f.write_str(why),
        }
    }
}

/// Parses JSON after a check of its `format` field.
fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unread> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    let wrong = |e: serde_json::Error| Unread::Wrong(e.to_string());
    let Version { format } = serde_json::from_slice(bytes).map_err(wrong)?;
    if format != VERSION {
        return Err(Unread::Other(format));
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

const _: () = assert!(CHUNK_PAGES.is_multiple_of(UNIT_PAGES) && SEGMENT_PAGES.is_multiple_of(CHUNK_PAGES));
