//! What lies in a store, byte by byte. docs/object-storage.md has the map of it.
//!
//! ```text
//! tags/NAME -> manifests/HASH -> for each GiB of the image, its maps/HASH from the oldest to the youngest
//!                                 -> chunks/HH/HASH: 128 pages, in compressed units of 16
//! ```
//!
//! All but tags and `freestone.json` is named by a keyed hash of its content, so it never changes, and
//! what was read is what was written if its hash fits its name.

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

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages that are compressed together, and can be read without the others.
pub const UNIT_PAGES: usize = 16;
/// Pages of an object.
pub const CHUNK_PAGES: usize = 128;
/// Bytes of those.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE;
/// Pages of an image that have a map together: 1 GiB.
pub const SEGMENT_PAGES: usize = 1 << 18;
/// Bytes of those.
pub const SEGMENT_BYTES: u64 = (SEGMENT_PAGES * PAGE) as u64;
/// Chunks of a segment that is stored whole.
pub const SEGMENT_CHUNKS: usize = SEGMENT_PAGES / CHUNK_PAGES;
/// Largest image in bytes, as that of a fork.
pub const IMAGE_BYTES_MAX: u64 = 256 << 40;
/// The version of the format that is written and read.
pub const VERSION: u32 = 2;

/// Why JSON is not read.
enum Unread {
    /// Of that version.
    Other(u32),
    /// What is wrong with it.
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

/// Reads JSON that has `format`, which is looked at before all else.
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
