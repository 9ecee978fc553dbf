//! Format of the objects in an image store. docs/reference/object-storage.md has an overview.
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
/// Number of pages in a unit, the part of a chunk that is compressed and can be read by itself.
pub const UNIT_PAGES: usize = 16;
/// Maximum number of pages in a chunk.
pub const CHUNK_PAGES: usize = 128;
/// Maximum uncompressed size of a chunk in bytes.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE;
/// Number of pages in a segment (1 GiB), the part of an image that has its own maps.
pub const SEGMENT_PAGES: usize = 1 << 18;
/// Size of a segment in bytes.
pub const SEGMENT_BYTES: u64 = (SEGMENT_PAGES * PAGE) as u64;
/// Maximum number of chunks in a full map of a segment.
pub const SEGMENT_CHUNKS: usize = SEGMENT_PAGES / CHUNK_PAGES;
/// Largest image in bytes (256 TiB), the same limit as for a fork.
pub const IMAGE_BYTES_MAX: u64 = 256 << 40;
/// Version of the store format that this program writes and reads.
pub const VERSION: u32 = 2;

/// Reason why a JSON object of the store cannot be read.
enum JsonError {
    /// The JSON has this format version, which is not [`VERSION`].
    Other(u32),
    /// The JSON is invalid. The text is the reason.
    Wrong(String),
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(format) => {
                write!(f, "it has format {format}, and this program knows format {VERSION}")
            }
            Self::Wrong(why) => f.write_str(why),
        }
    }
}

/// Parses a JSON object of the store, after a check that its `format` field is [`VERSION`].
fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonError> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    let wrong = |e: serde_json::Error| JsonError::Wrong(e.to_string());
    let Version { format } = serde_json::from_slice(bytes).map_err(wrong)?;
    if format != VERSION {
        return Err(JsonError::Other(format));
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

const _: () = assert!(CHUNK_PAGES.is_multiple_of(UNIT_PAGES) && SEGMENT_PAGES.is_multiple_of(CHUNK_PAGES));
