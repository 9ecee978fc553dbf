//! What was read first of an image, in its order: one object for an image, which may be written anew. It
//! is a hint, and nothing is believed because of it; in a domain with a key file nobody else can have made
//! it.
//!
//! ```text
//!  0 32  the hash of the content
//! 32     the content, as `meta` stores it: the name of the image, then 32 bytes for each chunk
//! ```

use super::{Error, Result, Store, TRACES};
use crate::format::meta;
use crate::format::name::{Kind, Name};
use crate::objects::{Fault, Until};

/// Most chunks of a trace: 32 GiB of an image.
pub const CHUNKS_MAX: usize = 1 << 16;
const NAME_BYTES: usize = 32;
const BYTES_MAX: usize = (1 + CHUNKS_MAX) * NAME_BYTES;

impl Store {
    /// The chunks that were read first; none where that was not noted.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn trace(&self, image: &Name, until: Until<'_>) -> Result<Vec<Name>> {
        let key = format!("{TRACES}{image}");
        let object = match self.read(&key, meta::STORED_BYTES_MAX, until) {
            Err(Error::Object { fault: Fault::NotFound, .. }) => return Ok(Vec::new()),
            read => read?.bytes,
        };
        let damaged = |why: &str| Error::Damaged(key.clone(), why.to_owned());
        let (name, object) =
            object.split_first_chunk::<NAME_BYTES>().ok_or_else(|| damaged("it is no trace"))?;
        let content = meta::content(&self.domain, Kind::Trace, &Name(*name), object, BYTES_MAX);
        let content = content.map_err(|error| damaged(&error.to_string()))?;
        let (names, rest) = content.as_chunks::<NAME_BYTES>();
        match names.split_first() {
            Some((of, names)) if *of == image.0 && rest.is_empty() => {
                Ok(names.iter().copied().map(Name).collect())
            }
            _ => Err(damaged("it is of another image")),
        }
    }

    /// Notes which chunks are read first, [`CHUNKS_MAX`] at most.
    ///
    /// # Errors
    /// What the store answers.
    pub fn set_trace(&self, image: &Name, chunks: &[Name], until: Until<'_>) -> Result<()> {
        let chunks = chunks.iter().take(CHUNKS_MAX);
        let content: Vec<u8> = std::iter::once(image).chain(chunks).flat_map(|name| name.0).collect();
        let (name, object) = meta::stored(&self.domain, Kind::Trace, &content).ok_or(Error::TooLarge)?;
        self.write(&format!("{TRACES}{image}"), &[&name.0[..], &object].concat(), until)
    }
}
