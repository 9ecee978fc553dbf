//! The algorithms of a saved file, and conversion of pages to the form that a family stores.

use std::sync::Arc;

use super::RestoreError;
use super::format::FileAlgorithm;
use super::reader::Page;
use freestone_core::sync::OnceLock;
use freestone_ram::codec::{self, Algorithm, Dictionary, Params, Streams, StreamsError};
use freestone_ram::ram::Family;
use freestone_ram::transfer::{Incoming, RestoreInto as _};

/// Error message for nonzero bytes of a page beyond the end of its device.
pub const BEHIND_THE_END: &str = "a page has content beyond the end of its device";

/// Error message for a lost page, which only files of kept devices can contain.
const LOST: &str = "a page was already lost when it was saved";

/// Reasons why the content of a block is refused.
pub enum ContentError {
    Damaged(&'static str),
    Other(RestoreError),
}

impl From<StreamsError> for ContentError {
    fn from(error: StreamsError) -> Self {
        match error {
            StreamsError::Params(_) => Self::Damaged("an algorithm has an invalid level or dictionary"),
            StreamsError::Device(_) => Self::Other(RestoreError::NoMemory),
        }
    }
}

/// An algorithm of a saved file, and how a family decompresses its pages.
pub struct FileCodec {
    algorithm: Algorithm,
    /// True if the algorithm is the family's primary one, which compresses new pages.
    is_primary: bool,
    /// Priority of the family's algorithm that can decompress the pages; `None` if there is none.
    priority: Option<u8>,
    dictionary: Option<Dictionary>,
    /// Streams to decompress pages if the family cannot, created on first use.
    streams: OnceLock<Arc<Streams>>,
}

impl FileCodec {
    /// Creates the codec of an algorithm. If the file has a trained dictionary and the family has
    /// none, the family adopts it.
    pub fn new(family: &Family, learned: FileAlgorithm) -> Result<Self, ContentError> {
        let FileAlgorithm { algorithm, level, trained, dictionary } = learned;
        let level = (algorithm != Algorithm::Store).then_some(level);
        if trained {
            let params = Params { level, dictionary: dictionary.clone(), algo: None };
            family.adopt_trained(|| Ok::<_, ContentError>(Streams::shared(algorithm, &params)?))?;
        }
        let is_primary = algorithm == family.comp_algorithm();
        let priority = family.priority_to_read(algorithm, dictionary.as_ref());
        Ok(Self { algorithm, is_primary, priority, dictionary, streams: OnceLock::new() })
    }

    /// Decompresses the compressed page `object` into `page`.
    fn unpack(&self, object: &[u8], page: &mut codec::Page) -> Result<(), ContentError> {
        let streams = if let Some(streams) = self.streams.get() {
            streams
        } else {
            // Decompression does not depend on the level.
            let params = Params { dictionary: self.dictionary.clone(), ..Params::default() };
            let streams = Streams::shared(self.algorithm, &params)?;
            self.streams.get_or_init(|| streams)
        };
        let unpacked = streams.decompress(object, page);
        unpacked.map_err(|_| ContentError::Damaged("a page cannot be decompressed"))
    }
}

/// Returns a page in the form that the family stores, or `None` if its content must be decompressed
/// first.
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

/// Decompresses a page of which `bytes` bytes are within the device, and returns the form to store.
pub fn incoming<'p>(
    algorithms: &[FileCodec],
    page: &Page<'p>,
    bytes: usize,
    content: &'p mut codec::Page,
) -> Result<Incoming<'p>, ContentError> {
    let known = |algorithm: u8| {
        algorithms.get(usize::from(algorithm)).ok_or(ContentError::Damaged("an algorithm is missing"))
    };
    match *page {
        Page::Same { pattern, .. } => content.as_chunks_mut().0.fill(pattern.to_ne_bytes()),
        Page::Parent { .. } => content.fill(0),
        Page::Lost => return Err(ContentError::Damaged(LOST)),
        Page::Pattern(pattern) => content.as_chunks_mut().0.fill(pattern),
        Page::Huge { content: raw, .. } => content.copy_from_slice(raw),
        Page::Compressed { algorithm, object } => known(algorithm)?.unpack(object, content)?,
    }
    if content[bytes..].iter().any(|&byte| byte != 0) {
        return Err(ContentError::Damaged(BEHIND_THE_END));
    }
    Ok(stored_form(algorithms, page).unwrap_or(Incoming::Page(content)))
}
