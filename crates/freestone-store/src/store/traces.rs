//! Traces: for an image, the chunks that readers needed first, in their order. Each image has at most one
//! trace, which can be rewritten. A trace is only a hint for prefetching. In a domain with a key file, only
//! holders of the key can write a valid trace.
//!
//! ```text
//!  0 32  hash of the content
//! 32     content, in the format of `meta`: the name of the image, then 32 bytes for each chunk
//! ```

use super::{Error, Result, Store, TRACES};
use crate::format::meta;
use crate::format::name::{Kind, Name};
use crate::objects::{CallLimits, Fault};

/// Maximum number of chunks in a trace. So many chunks have at most 32 GiB of pages.
pub const CHUNKS_MAX: usize = 1 << 16;
const NAME_BYTES: usize = 32;
const BYTES_MAX: usize = (1 + CHUNKS_MAX) * NAME_BYTES;

impl Store {
    /// Reads the trace of an image: the names of its chunks in the order of first use. Returns an empty list
    /// if the image has no trace.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn trace(&self, image: &Name, limits: CallLimits<'_>) -> Result<Vec<Name>> {
        let key = format!("{TRACES}{image}");
        let object = match self.read(&key, meta::STORED_BYTES_MAX, limits) {
            Err(Error::Object { fault: Fault::NotFound, .. }) => return Ok(Vec::new()),
            read => read?.bytes,
        };
        let damaged = |why: &str| Error::Damaged(key.clone(), why.to_owned());
        let (name, object) =
            object.split_first_chunk::<NAME_BYTES>().ok_or_else(|| damaged("too short for a trace"))?;
        let content = meta::content(&self.domain, Kind::Trace, &Name(*name), object, BYTES_MAX);
        let content = content.map_err(|error| damaged(&error.to_string()))?;
        let (names, rest) = content.as_chunks::<NAME_BYTES>();
        match names.split_first() {
            Some((of, names)) if *of == image.0 && rest.is_empty() => {
                Ok(names.iter().copied().map(Name).collect())
            }
            _ => Err(damaged("it belongs to another image")),
        }
    }

    /// Writes the trace of an image, truncated to [`CHUNKS_MAX`] chunks.
    pub fn set_trace(&self, image: &Name, chunks: &[Name], limits: CallLimits<'_>) -> Result<()> {
        let chunks = chunks.iter().take(CHUNKS_MAX);
        let content: Vec<u8> = std::iter::once(image).chain(chunks).flat_map(|name| name.0).collect();
        let (name, object) = meta::stored(&self.domain, Kind::Trace, &content).ok_or(Error::TooLarge)?;
        self.write(&format!("{TRACES}{image}"), &[&name.0[..], &object].concat(), limits)
    }
}
