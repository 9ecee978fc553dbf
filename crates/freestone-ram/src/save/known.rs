//! The algorithms of a file, and pages in the form in which a family takes them.

use std::sync::Arc;

use super::RestoreError;
use super::reader::Page;
use crate::codec::{self, Algorithm, Dictionary, Params, Streams, StreamsError};
use crate::ram::{Family, Incoming};
use freestone_core::sync::OnceLock;

/// What no device has.
pub const BEHIND_THE_END: &str = "a page has something behind the end of its device";

/// What only kept devices can be restored with.
const LOST: &str = "a page was lost before it was saved";

/// Why something of a block was not taken.
pub enum Refused {
    /// The file is to blame.
    Damaged(&'static str),
    Other(RestoreError),
}

impl From<StreamsError> for Refused {
    fn from(error: StreamsError) -> Self {
        match error {
            StreamsError::Params(_) => {
                Self::Damaged("an algorithm has a level or dictionary that it cannot have")
            }
            StreamsError::Device(_) => Self::Other(RestoreError::NoMemory),
        }
    }
}

/// An algorithm of a file, for a family.
pub struct Known {
    algorithm: Algorithm,
    /// Whether it is the one that the family compresses with.
    is_primary: bool,
    /// The priority in the family of what reads its objects.
    priority: Option<u8>,
    dictionary: Option<Dictionary>,
    /// What reads them where the family cannot, once there was one.
    streams: OnceLock<Arc<Streams>>,
}

impl Known {
    /// What was trained is given to a family that has nothing of its own yet.
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
            family.adopt(|| Ok::<_, Refused>(Streams::shared(algorithm, &params)?))?;
        }
        let is_primary = algorithm == family.comp_algorithm();
        let priority = family.reads(algorithm, dictionary.as_ref());
        Ok(Self { algorithm, is_primary, priority, dictionary, streams: OnceLock::new() })
    }

    /// A dictionary as the file has it.
    pub fn dictionary(bytes: &[u8]) -> Result<Option<Dictionary>, Refused> {
        match bytes {
            [] => Ok(None),
            bytes => {
                Dictionary::trained(bytes).map(Some).ok_or(Refused::Damaged("a dictionary is too large"))
            }
        }
    }

    /// The page of an object.
    fn unpack(&self, object: &[u8], page: &mut codec::Page) -> Result<(), Refused> {
        let streams = if let Some(streams) = self.streams.get() {
            streams
        } else {
            // No level is needed to read.
            let params = Params { dictionary: self.dictionary.clone(), ..Params::default() };
            let streams = Streams::shared(self.algorithm, &params)?;
            self.streams.get_or_init(|| streams)
        };
        let unpacked = streams.decompress(object, page);
        unpacked.map_err(|_| Refused::Damaged("a page cannot be decompressed"))
    }
}

/// A page of which the device has all, where it goes in as it is in the file and nothing need be
/// known of its content.
pub fn as_it_is<'p>(algorithms: &[Known], page: &Page<'p>) -> Option<Incoming<'p>> {
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

/// The content of a page, of which the device has so many bytes, and the form in which it goes in.
pub fn incoming<'p>(
    algorithms: &[Known],
    page: &Page<'p>,
    bytes: usize,
    content: &'p mut codec::Page,
) -> Result<Incoming<'p>, Refused> {
    let known = |algorithm: u8| {
        algorithms.get(usize::from(algorithm)).ok_or(Refused::Damaged("an algorithm is not there"))
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
    Ok(as_it_is(algorithms, page).unwrap_or(Incoming::Page(content)))
}
