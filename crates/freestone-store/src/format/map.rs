//! Maps: the locations of the pages of a segment (1 GiB of an image). A *full* map covers all pages, a
//! *delta* the pages that a push changed.
//!
//! ```text
//!  0  4  1 full, 2 delta; little endian
//!  4  4  number of chunks
//!  8     full: a bit for each 128 pages that have a chunk, 256 bytes; pages without a chunk are zeroes
//!        delta: a bit for each page in the delta; a bit for each page of zeroes; 32 KiB each
//!        for each chunk: 32 bytes, its name; 4 bytes, the size of its stored object
//! ```
//!
//! The chunks of a delta contain its pages in ascending order, 128 in each chunk, without pages of zeroes.

use freestone_core::zeroes::are_zeroes;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bitmap::{self, Bitmap, Ranked};
use super::chunk::STORED_BYTES_MAX;
use super::name::{Kind, Name, Naming};
use super::{CHUNK_PAGES, PAGE, SEGMENT_CHUNKS, SEGMENT_PAGES};

const FULL: u32 = 1;
const DELTA: u32 = 2;
const PRESENT_BYTES: usize = SEGMENT_CHUNKS / 8;
/// Maximum size of an encoded map in bytes.
pub const BYTES_MAX: usize = 8 + 2 * bitmap::BYTES + SEGMENT_CHUNKS * ENTRY_BYTES;
/// Maximum size of the encoded page hashes of a map in bytes.
pub const HASHES_BYTES_MAX: usize = SEGMENT_PAGES * PAGE_HASH_BYTES;
const PAGE_HASH_BYTES: usize = size_of::<PageHash>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Entry {
    name: [u8; 32],
    stored: U32,
}

const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(ENTRY_BYTES == 36);

/// Reference from a map to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRef {
    /// Name of the chunk.
    pub name: Name,
    /// Size of the stored chunk in bytes, as its writer recorded it.
    pub stored: u32,
}

/// First half of the keyed hash of a page. The hash of a page of zeroes is all zeroes.
pub type PageHash = [u8; 16];

/// Returns the [`PageHash`] of a page.
pub fn page_hash(naming: &Naming, page: &[u8]) -> PageHash {
    if are_zeroes(page) {
        return PageHash::default();
    }
    let Name(hash) = naming.name(Kind::Page, &[page]);
    hash[..PAGE_HASH_BYTES].try_into().unwrap_or_default()
}

/// Location of a page according to one map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageLocation {
    /// The map does not contain the page. An older map of the segment locates the page.
    Below,
    /// The page is all zeroes, and is in no chunk.
    Zero,
    /// The page is in a chunk of the map. Pages after the end of the chunk are zeroes.
    In {
        /// Index of the chunk in the map.
        chunk: usize,
        /// Index of the page in the chunk.
        page: usize,
    },
}

/// Map of one segment, written by one push.
pub enum Map {
    /// Map of all pages of the segment.
    Full {
        /// For each 128 pages of the segment, the index of their chunk in `chunks`; `None` if the pages are
        /// zeroes.
        places: Box<[Option<u16>]>,
        /// Chunks of the map, in the order of their pages.
        chunks: Box<[ChunkRef]>,
    },
    /// Map of the pages that a push changed.
    Delta {
        /// Changed pages that are not zeroes.
        data: Ranked,
        /// Changed pages that are zeroes.
        zero: Bitmap,
        /// Chunks with the pages of `data`.
        chunks: Box<[ChunkRef]>,
    },
}

impl Map {
    /// Creates a full map. `all` has a chunk for each 128 pages of the segment, or `None` if these pages are
    /// zeroes.
    pub fn full(all: &[Option<ChunkRef>]) -> Self {
        let mut chunks = Vec::new();
        let mut places = vec![None; SEGMENT_CHUNKS];
        for (place, chunk) in places.iter_mut().zip(all) {
            if let Some(chunk) = chunk {
                *place = Some(chunks.len() as u16);
                chunks.push(*chunk);
            }
        }
        Self::Full { places: places.into(), chunks: chunks.into() }
    }

    /// Creates a delta map. `chunks` contain the pages of `data`, which must be disjoint from `zero`.
    pub fn delta(data: Bitmap, zero: Bitmap, chunks: Vec<ChunkRef>) -> Self {
        Self::Delta { data: data.into(), zero, chunks: chunks.into() }
    }

    /// Returns the chunks of the map, in the order of their indexes.
    pub fn chunks(&self) -> &[ChunkRef] {
        match self {
            Self::Full { chunks, .. } | Self::Delta { chunks, .. } => chunks,
        }
    }

    /// Returns the location of a page of the segment according to this map.
    pub fn place(&self, page: usize) -> PageLocation {
        match self {
            Self::Full { places, .. } => match places[page / CHUNK_PAGES] {
                None => PageLocation::Zero,
                Some(chunk) => PageLocation::In { chunk: usize::from(chunk), page: page % CHUNK_PAGES },
            },
            Self::Delta { data, zero, .. } => match data.place(page) {
                Some(place) => PageLocation::In { chunk: place / CHUNK_PAGES, page: place % CHUNK_PAGES },
                None if zero.has(page) => PageLocation::Zero,
                None => PageLocation::Below,
            },
        }
    }

    /// Returns the pages that a delta contains, including pages of zeroes, or `None` for a full map.
    pub fn held(&self) -> Option<Bitmap> {
        let Self::Delta { data, zero, .. } = self else { return None };
        let mut held = data.bits().clone();
        held.add(zero);
        Some(held)
    }

    /// Encodes the map.
    pub fn bytes(&self) -> Vec<u8> {
        let chunks = self.chunks();
        let entries: Vec<Entry> =
            chunks.iter().map(|chunk| Entry { name: chunk.name.0, stored: U32::new(chunk.stored) }).collect();
        let count = (chunks.len() as u32).to_le_bytes();
        match self {
            Self::Full { places, .. } => {
                let mut present = [0_u8; PRESENT_BYTES];
                for (number, _) in places.iter().enumerate().filter(|(_, place)| place.is_some()) {
                    present[number / 8] |= 1 << (number % 8);
                }
                [&FULL.to_le_bytes(), &count, &present[..], entries.as_bytes()].concat()
            }
            Self::Delta { data, zero, .. } => {
                let mut held = data.bits().clone();
                held.add(zero);
                [&DELTA.to_le_bytes(), &count, &held.bytes()[..], &zero.bytes(), entries.as_bytes()].concat()
            }
        }
    }

    /// Decodes a map, or returns `None` if it is invalid. The caller has verified the hash, so only a writer
    /// with the key of the domain can have written the map. Even so, all indexes are checked.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        freestone_core::trail::step!();
        let (kind, rest) = bytes.split_first_chunk::<4>()?;
        let (count, rest) = rest.split_first_chunk::<4>()?;
        let count = u32::from_le_bytes(*count) as usize;
        match u32::from_le_bytes(*kind) {
            FULL => {
                let (present, rest) = rest.split_first_chunk::<PRESENT_BYTES>()?;
                let chunks = chunks(rest, count)?;
                let mut next = 0_u16;
                let places: Box<[_]> = (0..SEGMENT_CHUNKS)
                    .map(|number| {
                        (present[number / 8] >> (number % 8) & 1 == 1).then(|| {
                            next += 1;
                            next - 1
                        })
                    })
                    .collect();
                (usize::from(next) == count).then_some(Self::Full { places, chunks })
            }
            DELTA => {
                let (held, rest) = rest.split_first_chunk::<{ bitmap::BYTES }>()?;
                let (zero, rest) = rest.split_first_chunk::<{ bitmap::BYTES }>()?;
                let chunks = chunks(rest, count)?;
                let (held, zero) = (Bitmap::parse(held), Bitmap::parse(zero));
                if zero.without(&held).count() != 0 {
                    return None;
                }
                let data = held.without(&zero);
                let fits = data.count().div_ceil(CHUNK_PAGES) == count;
                fits.then(|| Self::Delta { data: data.into(), zero, chunks })
            }
            _ => None,
        }
    }
}

fn chunks(bytes: &[u8], count: usize) -> Option<Box<[ChunkRef]>> {
    if count > SEGMENT_CHUNKS {
        return None;
    }
    let entries = <[Entry]>::ref_from_bytes(bytes).ok()?;
    let is_sound = |entry: &Entry| entry.stored.get() as usize <= STORED_BYTES_MAX;
    let chunk = |entry: &Entry| ChunkRef { name: Name(entry.name), stored: entry.stored.get() };
    (entries.len() == count && entries.iter().all(is_sound)).then(|| entries.iter().map(chunk).collect())
}

/// Hashes of the pages of a map, in the order of its chunks. For a full map each chunk has 128 hashes, even
/// if the chunk is shorter.
pub struct Hashes(Vec<PageHash>);

impl Hashes {
    /// Wraps page hashes, which must be in the order of the chunks of their map.
    pub fn new(hashes: Vec<PageHash>) -> Self {
        Self(hashes)
    }

    /// Decodes page hashes, or returns `None` if their number does not match the map.
    pub fn parse(bytes: &[u8], map: &Map) -> Option<Self> {
        let (hashes, rest) = bytes.as_chunks::<PAGE_HASH_BYTES>();
        let count = match map {
            Map::Full { chunks, .. } => chunks.len() * CHUNK_PAGES,
            Map::Delta { data, .. } => data.bits().count(),
        };
        (rest.is_empty() && hashes.len() == count).then(|| Self(hashes.to_vec()))
    }

    /// Encodes the page hashes.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_flattened()
    }

    /// Returns the hash of the page at index `page` of the chunk at index `chunk`, or zeroes if there is no
    /// such hash.
    pub fn at(&self, chunk: usize, page: usize) -> PageHash {
        self.0.get(chunk * CHUNK_PAGES + page).copied().unwrap_or_default()
    }
}

const _: () = assert!(SEGMENT_CHUNKS <= u16::MAX as usize && PAGE.is_multiple_of(64));

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(number: usize) -> ChunkRef {
        ChunkRef { name: Name([number as u8; 32]), stored: number as u32 + 1 }
    }

    #[test]
    fn full_map_locates_each_page() {
        let all: Vec<_> = (0..SEGMENT_CHUNKS - 5).map(|n| (n % 3 != 1).then(|| chunk(n))).collect();
        let map = Map::parse(&Map::full(&all).bytes()).unwrap();
        for page in (0..SEGMENT_PAGES).step_by(61) {
            match (map.place(page), all.get(page / CHUNK_PAGES).copied().flatten()) {
                (PageLocation::Zero, None) => {}
                (PageLocation::In { chunk, page: within }, Some(want)) => {
                    assert_eq!((map.chunks()[chunk], within), (want, page % CHUNK_PAGES));
                }
                (place, want) => panic!("{page}: {place:?}, {want:?}"),
            }
        }
        assert!(map.held().is_none());
        let hashes = vec![[1; 16]; map.chunks().len() * CHUNK_PAGES];
        let hashes = Hashes::new(hashes);
        assert_eq!(Hashes::parse(hashes.bytes(), &map).unwrap().at(3, 127), [1; 16]);
        assert!(Hashes::parse(&hashes.bytes()[16..], &map).is_none());
        assert!(Hashes::parse(&hashes.bytes()[1..], &map).is_none());
    }

    #[test]
    fn delta_map_packs_pages() {
        let (mut data, mut zero) = (Bitmap::default(), Bitmap::default());
        let pages: Vec<usize> = (0..SEGMENT_PAGES).filter(|page| page % 100 == 7).collect();
        for page in &pages {
            data.set(*page, true);
            zero.set(page + 1, true);
        }
        let chunks: Vec<_> = (0..pages.len().div_ceil(CHUNK_PAGES)).map(chunk).collect();
        let map = Map::parse(&Map::delta(data, zero, chunks).bytes()).unwrap();
        for (at, page) in pages.iter().enumerate() {
            let place = PageLocation::In { chunk: at / CHUNK_PAGES, page: at % CHUNK_PAGES };
            assert_eq!(map.place(*page), place);
            assert_eq!(map.place(page + 1), PageLocation::Zero);
            assert_eq!(map.place(page + 2), PageLocation::Below);
        }
        assert_eq!(map.held().unwrap().count(), 2 * pages.len());
    }

    #[test]
    fn invalid_map_is_refused() {
        let full = Map::full(&[Some(chunk(1)), None, Some(chunk(2))]).bytes();
        let mut data = Bitmap::default();
        data.set(9, true);
        let delta = Map::delta(data, Bitmap::default(), vec![chunk(1)]).bytes();
        for bytes in [&full, &delta] {
            assert!(Map::parse(bytes).is_some());
            for cut in (0..bytes.len()).step_by(11) {
                assert!(Map::parse(&bytes[..cut]).is_none());
            }
            // Invalid bytes: another map kind, other chunk counts, and bits of pages without a chunk.
            for (at, value) in [(0, 3), (4, 200), (4, 0), (7, 0xff), (8 + 200, 0xff)] {
                let mut wrong = bytes.clone();
                wrong[at] = value;
                // A chunk of a delta can contain up to 128 pages, so more page bits are valid.
                let is_fine = at == 208 && bytes == &delta;
                assert_eq!(Map::parse(&wrong).is_some(), is_fine, "{at}");
            }
        }
        let mut too_long = full.clone();
        let at = too_long.len() - 1;
        too_long[at] = 0xff;
        assert!(Map::parse(&too_long).is_none());
        let mut stray_zero = delta;
        stray_zero[8 + bitmap::BYTES + 5] = 1;
        assert!(Map::parse(&stray_zero).is_none());
    }

    #[test]
    fn zero_page_has_zero_hash() {
        let naming = super::super::domain::Domain::new(None, false, super::super::domain::GRACE).0.naming;
        let mut page = [0; PAGE];
        assert!(are_zeroes(&page) && page_hash(&naming, &page) == PageHash::default());
        page[PAGE - 1] = 1;
        assert!(!are_zeroes(&page) && page_hash(&naming, &page) != PageHash::default());
    }
}
