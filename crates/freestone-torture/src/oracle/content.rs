//! The content of a write: a function of only the write's id and the sector number. Reads can thus
//! be judged without storing data, and bytes found can be identified.

use std::fmt;
use std::sync::LazyLock;

use freestone_testkit::{Rng, first_difference};

/// Bytes per sector, the unit in which a write may tear (be done in part).
pub const SECTOR_BYTES: usize = 512;

/// First four bytes of a sector with a tag.
const MAGIC: u32 = 0x464f_5254;
/// Bytes of a tag: magic, checksum, id of the write, and sector number.
const TAG_BYTES: usize = 24;
/// The remainder of a write's id modulo this number encodes its fill pattern.
const FILLS: u64 = 8;
/// Number of different pages of [`Fill::Common`].
const COMMON_PAGES: u64 = 4;
/// Number of sectors of a page.
const PAGE_SECTORS: u64 = 8;

/// Fill pattern of a write. Devices treat contents differently by how well they compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// A tag, then words of a small vocabulary. Compresses like text.
    Text,
    /// A tag, then noise. Does not compress.
    Noise,
    /// A tag, then one repeated word. Compresses well.
    Repeat,
    /// A tag and noise, then zeroes from the middle of the sector on. Compresses to about half.
    Half,
    /// The same word in the whole write, without tags, so all pages are same-filled.
    Same,
    /// Words without a tag, the same in each page of a write, and one of few pages. So pages of
    /// different writes and devices are equal.
    Common,
}

impl Fill {
    /// All fill patterns with content of their own.
    pub const ALL: [Self; 5] = [Self::Text, Self::Noise, Self::Repeat, Self::Half, Self::Same];

    /// Returns the fill pattern of a write for which this number was drawn: an eighth of all numbers
    /// select [`Fill::Common`].
    pub const fn drawn(number: u8) -> Self {
        let number = number as usize;
        if number / Self::ALL.len() % 8 == 7 { Self::Common } else { Self::ALL[number % Self::ALL.len()] }
    }

    pub const fn of(id: u64) -> Self {
        match id % FILLS {
            0 | 1 => Self::Text,
            2 | 3 => Self::Noise,
            4 => Self::Repeat,
            5 => Self::Half,
            6 => Self::Same,
            _ => Self::Common,
        }
    }

    /// Returns the id of write number `serial`, counted from 1, with this fill pattern.
    pub const fn id(self, serial: u64) -> u64 {
        let low = match self {
            Self::Text => 0,
            Self::Noise => 2,
            Self::Repeat => 4,
            Self::Half => 5,
            Self::Same => 6,
            Self::Common => 7,
        };
        serial * FILLS + low
    }
}

/// Returns the bytes that the write with this id puts into this sector.
pub fn content(id: u64, sector: u64) -> [u8; SECTOR_BYTES] {
    let mut out = [0; SECTOR_BYTES];
    let fill = Fill::of(id);
    match fill {
        Fill::Same => {
            repeat(&mut out, pattern(id));
            return out;
        }
        Fill::Common => return *common(common_page(id), sector % PAGE_SECTORS),
        _ => {}
    }
    let mut rng = Rng::new(id ^ sector.rotate_left(32));
    let body = &mut out[TAG_BYTES..];
    match fill {
        Fill::Text => {
            words(&mut rng, body);
        }
        Fill::Noise => rng.fill(body),
        Fill::Repeat => repeat(body, rng.word()),
        Fill::Half => rng.fill(&mut body[..SECTOR_BYTES / 2 - TAG_BYTES]),
        Fill::Same | Fill::Common => unreachable!("they have no tag"),
    }
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..8].copy_from_slice(&check(id, sector).to_le_bytes());
    out[8..16].copy_from_slice(&id.to_le_bytes());
    out[16..24].copy_from_slice(&sector.to_le_bytes());
    out
}

/// Fills `out` with the content of the write `id`. The first byte of `out` is the start of
/// `first_sector`.
pub fn fill(id: u64, first_sector: u64, out: &mut [u8]) {
    for (sector, out) in (first_sector..).zip(out.chunks_mut(SECTOR_BYTES)) {
        out.copy_from_slice(&content(id, sector)[..out.len()]);
    }
}

const WORDS: [&[u8; 8]; 16] = [
    b"slate   ",
    b"marble  ",
    b"granite ",
    b"chalk\n  ",
    b"basalt  ",
    b"gneiss  ",
    b"flint   ",
    b"tuff    ",
    b"schist  ",
    b"dolomite",
    b"clay\n   ",
    b"sand    ",
    b"gravel  ",
    b"loam    ",
    b"marl    ",
    b"shale\n  ",
];

fn words(rng: &mut Rng, out: &mut [u8]) {
    for chunk in out.chunks_mut(8) {
        chunk.copy_from_slice(&WORDS[rng.below(WORDS.len() as u64) as usize][..chunk.len()]);
    }
}

/// Returns the sector `part` of the common page number `page`.
fn common(page: u64, part: u64) -> &'static [u8; SECTOR_BYTES] {
    static SECTORS: LazyLock<Vec<[u8; SECTOR_BYTES]>> = LazyLock::new(|| {
        let sector = |number| {
            let mut out = [0; SECTOR_BYTES];
            words(&mut Rng::new(number), &mut out);
            out
        };
        (0..COMMON_PAGES * PAGE_SECTORS).map(sector).collect()
    });
    &SECTORS[(page * PAGE_SECTORS + part) as usize]
}

/// Returns the number of the common page of a write with this id.
const fn common_page(id: u64) -> u64 {
    id / FILLS % COMMON_PAGES
}

fn repeat(out: &mut [u8], word: u64) {
    let word = word.to_le_bytes();
    for chunk in out.chunks_mut(word.len()) {
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Returns the word that a write without tags repeats; never zero, since zeroes are a content of
/// their own.
fn pattern(id: u64) -> u64 {
    Rng::new(!id).word() | 1
}

fn check(id: u64, sector: u64) -> u32 {
    (Rng::new(id.wrapping_mul(31).wrapping_add(sector)).word() >> 32) as u32
}

/// The content that a sector has in one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content {
    Zero,
    /// The content of the write with this id.
    Data(u64),
}

impl Content {
    /// Returns true if `bytes` are this content at sector `at`.
    pub fn is(self, at: u64, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => bytes.iter().all(|&byte| byte == 0),
            Self::Data(id) => bytes == content(id, at),
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zeroes"),
            Self::Data(id) => write!(f, "version {id}"),
        }
    }
}

/// The identification of the bytes of a sector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentifiedBytes {
    Zero,
    /// The content of a write, generated for this sector or another one.
    Tagged {
        id: u64,
        /// Sector for which the content was generated.
        sector: u64,
    },
    /// The valid tag of a write and sector, followed by other bytes than the write has there.
    Torn {
        id: u64,
        /// Sector for which the tag was generated.
        sector: u64,
        /// Offset in bytes of the first byte that differs.
        from: usize,
    },
    /// One repeated word, from a write without tags. The write can be identified only by comparing.
    Pattern(u64),
    /// A sector of a common page, from any write with this page.
    Common {
        page: u64,
        part: u64,
    },
    /// Unknown content, with its first bytes.
    Garbage([u8; 16]),
}

impl IdentifiedBytes {
    /// Identifies the bytes of one sector by their tag or repeated word.
    pub fn identify(bytes: &[u8]) -> Self {
        if bytes == &[0; SECTOR_BYTES][..bytes.len()] {
            return Self::Zero;
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (id, sector) = (word(8), word(16));
        if word(0) == u64::from(MAGIC) | u64::from(check(id, sector)) << 32 {
            return match first_difference(&content(id, sector)[..bytes.len()], bytes) {
                None => Self::Tagged { id, sector },
                Some(from) => Self::Torn { id, sector, from },
            };
        }
        if bytes.chunks(8).all(|chunk| chunk == &bytes[..8]) {
            return Self::Pattern(word(0));
        }
        let is_common = |&(page, part): &(u64, u64)| bytes == &common(page, part)[..bytes.len()];
        let parts = (0..COMMON_PAGES).flat_map(|page| (0..PAGE_SECTORS).map(move |part| (page, part)));
        if let Some((page, part)) = parts.into_iter().find(is_common) {
            return Self::Common { page, part };
        }
        Self::Garbage(bytes[..16].try_into().expect("sixteen bytes"))
    }

    /// Returns true if these bytes, found in sector `at`, are the content `version`.
    pub fn matches(&self, at: u64, version: Content) -> bool {
        match (self, version) {
            (Self::Zero, Content::Zero) => true,
            (Self::Tagged { id, sector }, Content::Data(of)) => *id == of && *sector == at,
            (Self::Pattern(word), Content::Data(of)) => Fill::of(of) == Fill::Same && pattern(of) == *word,
            (Self::Common { page, part }, Content::Data(of)) => {
                Fill::of(of) == Fill::Common && common_page(of) == *page && at % PAGE_SECTORS == *part
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fill_is_identified() {
        for fill in Fill::ALL.into_iter().chain([Fill::Common]) {
            for serial in [1, 2, 77, 1 << 40] {
                let id = fill.id(serial);
                assert_eq!(Fill::of(id), fill);
                for sector in [0, 9, 1 << 33] {
                    let bytes = content(id, sector);
                    let found = IdentifiedBytes::identify(&bytes);
                    assert!(found.matches(sector, Content::Data(id)), "{fill:?} {found:?}");
                    assert!(Content::Data(id).is(sector, &bytes));
                    assert!(!found.matches(sector, Content::Data(fill.id(serial + 1))));
                    assert!(!found.matches(sector, Content::Zero));
                    assert_eq!(found.matches(sector + 1, Content::Data(id)), fill == Fill::Same);
                }
            }
        }
    }

    #[test]
    fn torn_and_unknown_bytes_are_identified() {
        let id = Fill::Noise.id(5);
        let mut bytes = content(id, 3);
        bytes[256..].copy_from_slice(&content(Fill::Noise.id(6), 3)[256..]);
        assert_eq!(IdentifiedBytes::identify(&bytes), IdentifiedBytes::Torn { id, sector: 3, from: 256 });
        bytes[4] ^= 1;
        assert!(matches!(IdentifiedBytes::identify(&bytes), IdentifiedBytes::Garbage(_)));
        assert_eq!(IdentifiedBytes::identify(&[0; SECTOR_BYTES]), IdentifiedBytes::Zero);
        assert_eq!(
            IdentifiedBytes::identify(&[7; SECTOR_BYTES]),
            IdentifiedBytes::Pattern(0x0707_0707_0707_0707)
        );
    }

    #[test]
    fn page_of_fill_same_is_same_filled() {
        let mut page = [0; 4096];
        fill(Fill::Same.id(9), 8, &mut page);
        assert!(page.chunks(8).all(|chunk| chunk == &page[..8]));
    }
}
