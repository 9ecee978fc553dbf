//! What a write puts into a sector: a function of the write's id and the sector alone, so that
//! nothing has to be kept to judge a read, and so that what is found can be named.

use std::fmt;

use freestone_testkit::{Rng, first_difference};

/// Bytes of a sector: the unit in which writes may be torn.
pub const SECTOR_BYTES: usize = 512;

/// Marks a sector that begins with a tag.
const MAGIC: u32 = 0x464f_5254;
/// Magic, check, id, sector.
const TAG_BYTES: usize = 24;
/// The low bits of an id say how its sectors are filled.
const FILLS: u64 = 8;

/// How the sectors of a write are filled, since devices treat contents differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// A tag, then words of a small vocabulary: compresses as text does.
    Text,
    /// A tag, then noise: does not compress.
    Noise,
    /// A tag, then one word over and over.
    Repeat,
    /// A tag and noise, then zeroes from the middle on.
    Half,
    /// No tag: one word over and over, the same in all sectors of the write, so that its pages are
    /// same-filled.
    Same,
}

impl Fill {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Text, Self::Noise, Self::Repeat, Self::Half, Self::Same];

    /// How the sectors of this write are filled.
    pub const fn of(id: u64) -> Self {
        match id % FILLS {
            0 | 1 => Self::Text,
            2 | 3 => Self::Noise,
            4 => Self::Repeat,
            5 => Self::Half,
            _ => Self::Same,
        }
    }

    /// The id of the write number `serial`, from 1 on, that is to be filled so.
    pub const fn id(self, serial: u64) -> u64 {
        let low = match self {
            Self::Text => 0,
            Self::Noise => 2,
            Self::Repeat => 4,
            Self::Half => 5,
            Self::Same => 6,
        };
        serial * FILLS + low
    }
}

/// What the write `id` puts into this sector.
pub fn content(id: u64, sector: u64) -> [u8; SECTOR_BYTES] {
    let mut out = [0; SECTOR_BYTES];
    let fill = Fill::of(id);
    if fill == Fill::Same {
        repeat(&mut out, pattern(id));
        return out;
    }
    let mut rng = Rng::new(id ^ sector.rotate_left(32));
    let body = &mut out[TAG_BYTES..];
    match fill {
        Fill::Text => {
            for chunk in body.chunks_mut(8) {
                chunk.copy_from_slice(&WORDS[rng.below(WORDS.len() as u64) as usize][..chunk.len()]);
            }
        }
        Fill::Noise => rng.fill(body),
        Fill::Repeat => repeat(body, rng.word()),
        Fill::Half => rng.fill(&mut body[..SECTOR_BYTES / 2 - TAG_BYTES]),
        Fill::Same => unreachable!("it has no tag"),
    }
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..8].copy_from_slice(&check(id, sector).to_le_bytes());
    out[8..16].copy_from_slice(&id.to_le_bytes());
    out[16..24].copy_from_slice(&sector.to_le_bytes());
    out
}

/// Fills `out`, which begins at this sector, with what the write `id` puts there.
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

fn repeat(out: &mut [u8], word: u64) {
    let word = word.to_le_bytes();
    for chunk in out.chunks_mut(word.len()) {
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// The word of a write that is filled with one; never zero.
fn pattern(id: u64) -> u64 {
    Rng::new(!id).word() | 1
}

fn check(id: u64, sector: u64) -> u32 {
    (Rng::new(id.wrapping_mul(31).wrapping_add(sector)).word() >> 32) as u32
}

/// What a version of a sector looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content {
    /// Zeroes.
    Zero,
    /// What the write with this id puts there.
    Data(u64),
}

impl Content {
    /// Whether the sector `at` looks like this.
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

/// What the bytes of a sector are, by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Zeroes.
    Zero,
    /// What this write put into a sector, perhaps another one.
    Tagged {
        /// Of the write.
        id: u64,
        /// Where the bytes belong.
        sector: u64,
    },
    /// The tag of this write and sector, with other bytes behind it.
    Torn {
        /// Of the write.
        id: u64,
        /// Where the tag belongs.
        sector: u64,
        /// The first byte that is not the write's.
        from: usize,
    },
    /// One word over and over: of a write without tags, which can only be found by comparing.
    Pattern(u64),
    /// Nothing that was ever written; these are its first bytes.
    Garbage([u8; 16]),
}

impl Found {
    /// Recognises the bytes of one sector.
    pub fn in_bytes(bytes: &[u8]) -> Self {
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
        Self::Garbage(bytes[..16].try_into().expect("sixteen bytes"))
    }

    /// Whether a sector `at` in which this was found has this version.
    pub fn matches(&self, at: u64, version: Content) -> bool {
        match (self, version) {
            (Self::Zero, Content::Zero) => true,
            (Self::Tagged { id, sector }, Content::Data(of)) => *id == of && *sector == at,
            (Self::Pattern(word), Content::Data(of)) => Fill::of(of) == Fill::Same && pattern(of) == *word,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_content_is_recognised() {
        for fill in Fill::ALL {
            for serial in [1, 2, 77, 1 << 40] {
                let id = fill.id(serial);
                assert_eq!(Fill::of(id), fill);
                for sector in [0, 9, 1 << 33] {
                    let bytes = content(id, sector);
                    let found = Found::in_bytes(&bytes);
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
    fn what_is_not_a_content_is_named() {
        let id = Fill::Noise.id(5);
        let mut bytes = content(id, 3);
        bytes[256..].copy_from_slice(&content(Fill::Noise.id(6), 3)[256..]);
        assert_eq!(Found::in_bytes(&bytes), Found::Torn { id, sector: 3, from: 256 });
        bytes[4] ^= 1;
        assert!(matches!(Found::in_bytes(&bytes), Found::Garbage(_)));
        assert_eq!(Found::in_bytes(&[0; SECTOR_BYTES]), Found::Zero);
        assert_eq!(Found::in_bytes(&[7; SECTOR_BYTES]), Found::Pattern(0x0707_0707_0707_0707));
    }

    #[test]
    fn a_page_of_a_pattern_is_same_filled() {
        let mut page = [0; 4096];
        fill(Fill::Same.id(9), 8, &mut page);
        assert!(page.chunks(8).all(|chunk| chunk == &page[..8]));
    }
}
