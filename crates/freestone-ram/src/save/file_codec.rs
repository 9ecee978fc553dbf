//! The algorithms of a file, and conversion of pages to the form that a family stores.

use std::sync::Arc;

use super::RestoreError;
use super::reader::Page;
use crate::codec::{self, Algorithm, Dictionary, Params, Streams, StreamsError};
use crate::ram::{Family, Incoming};
use freestone_core::sync::OnceLock;

/// Message for content behind a device's end.
pub const BEHIND_THE_END: &str = "a page has content beyond the end of its device";

/// Message for a lost page, which only kept devices can have.
const LOST: &str = "a page was already lost when it was saved";

/// Reasons to refuse content of a block.
pub enum Refused {
    Damaged(&'static str),
    Other(RestoreError),
}

impl From<StreamsError> for Refused {
    fn from(error: StreamsError) -> Self {
        match error {
            StreamsError::Params(_) => Self::Damaged("an algorithm has an invalid level or dictionary"),
            StreamsError::Device(_) => Self::Other(RestoreError::NoMemory),
        }
    }
}

/// An algorithm of a file, as seen by a family.
pub struct FileCodec {
    algorithm: Algorithm,
    /// Whether the family compresses with this algorithm.
    is_primary: bool,
    /// Priority in the family that can decompress the objects.
    priority: Option<u8>,
    dictionary: Option<Dictionary>,
    /// Streams to decompress objects if the family cannot, created on first use.
    streams: OnceLock<Arc<Streams>>,
}

impl FileCodec {
    /// Creates the algorithm. A family without a trained dictionary adopts a trained one.
    pub fn new(
        family: &Family,
        algorithm: Algorithm,
        level: i32,
        trained: bool,
        dictionary: Option<Dictionary>,
    ) -> Result<Self, Refused> {
        let level = (algorithm != Algorithm::Store).then_some(level);
        if trained {
            let params = Params { level, dictionary: dictionary.clone(), algo: None };
            family.adopt_trained(|| Ok::<_, Refused>(Streams::shared(algorithm, &params)?))?;
        }
        let is_primary = algorithm == family.comp_algorithm();
        let priority = family.priority_to_read(algorithm, dictionary.as_ref());
        Ok(Self { algorithm, is_primary, priority, dictionary, streams: OnceLock::new() })
    }

    pub fn dictionary(bytes: &[u8]) -> Result<Option<Dictionary>, Refused> {
        match bytes {
            [] => Ok(None),
            bytes => {
                Dictionary::trained(bytes).map(Some).ok_or(Refused::Damaged("a dictionary is too large"))
            }
        }
    }

    /// Decompresses an object.
    fn unpack(&self, object: &[u8], page: &mut codec::Page) -> Result<(), Refused> {
        let streams = if let Some(streams) = self.streams.get() {
            streams
        } else {
            // Decompression needs no level.
            let params = Params { dictionary: self.dictionary.clone(), ..Params::default() };
            let streams = Streams::shared(self.algorithm, &params)?;
            self.streams.get_or_init(|| streams)
        };
        let unpacked = streams.decompress(object, page);
        unpacked.map_err(|_| Refused::Damaged("a page cannot be decompressed"))
    }
}

/// Returns a page in its stored form, if it can be inserted without looking at its content.
pub fn stored_form<'p>(algorithms: &[FileCodec], page: &Page<'p>) -> Option<Incoming<'p>> {
    Some(match *page {
        Page::Same { pattern, .. } => Incoming::Same(pattern),
        Page::Parent { .. } => Incoming::Parent,
        Page::Lost => return None,
        Page::Pattern(pattern) => Incoming::Pattern(pattern),
        Page::Huge { algorithm, content } if algorithms.get(usize::from(algorithm))?.is_primary => {
            Incoming::Huge(content)
        }
        Page::Huge { content, .. } => Incoming::Page(content),
        Page::Compressed { algorithm, object } => {
            Incoming::Compressed { priority: algorithms.get(usize::from(algorithm))?.priority?, object }
        }
    })
}

/// Decompresses a page of which the device has `bytes` bytes, and returns the form to insert.
pub fn incoming<'p>(
    algorithms: &[FileCodec],
    page: &Page<'p>,
    bytes: usize,
    content: &'p mut codec::Page,
) -> Result<Incoming<'p>, Refused> {
    let known = |algorithm: u8| {
        algorithms.get(usize::from(algorithm)).ok_or(Refused::Damaged("an algorithm is missing"))
    };
    match *page {
        Page::Same { pattern, .. } => content.as_chunks_mut().0.fill(pattern.to_ne_bytes()),
        Page::Parent { .. } => content.fill(0),
        Page::Lost => return Err(Refused::Damaged(LOST)),
        Page::Pattern(pattern) => content.as_chunks_mut().0.fill(pattern),
        Page::Huge { content: raw, .. } => content.copy_from_slice(raw),
        Page::Compressed { algorithm, object } => known(algorithm)?.unpack(object, content)?,
    }
    if content[bytes..].iter().any(|&byte| byte != 0) {
        return Err(Refused::Damaged(BEHIND_THE_END));
    }
    Ok(stored_form(algorithms, page).unwrap_or(Incoming::Page(content)))
}
