//! Names of objects, derived from their content.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Name of an object: the keyed BLAKE3 hash of its content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; 32]);

/// Kind of content that a name is computed for. The same bytes have different names for different kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Chunk: the size of its pages and the hashes of its units.
    Chunk = 1,
    /// Pages of one unit of a chunk.
    Unit = 2,
    /// Content of one page.
    Page = 3,
    /// Map of a segment.
    Map = 4,
    /// Page hashes of a map.
    Hashes = 5,
    /// Manifest of an image.
    Manifest = 6,
    /// Trace of an image.
    Trace = 7,
    /// Fields of a tag. The hash is the seal of the tag.
    Tag = 8,
    /// Fields of `freestone.json`. The hash is its `check` field.
    Check = 9,
}

/// Number of values of [`Kind`], including the unused value 0.
const KINDS: usize = Kind::Check as usize + 1;

/// Keys of the keyed hashes that are the object names of a domain, one key for each [`Kind`].
///
/// A prefix byte for the kind would be slower: it would shift the content against the 1 KiB blocks that
/// BLAKE3 hashes in parallel, and the hash of a page would take three times as long.
#[derive(Clone)]
pub struct Naming([[u8; 32]; KINDS]);

impl Naming {
    /// Derives the keys for all kinds from the naming key of a domain.
    pub fn new(key: &[u8; 32]) -> Self {
        let mut kind = 0;
        Self([(); KINDS].map(|()| {
            let of_kind = *blake3::keyed_hash(key, &[kind]).as_bytes();
            kind += 1;
            of_kind
        }))
    }

    /// Returns the name of the content that consists of the concatenated `parts`.
    pub fn name(&self, kind: Kind, parts: &[&[u8]]) -> Name {
        let mut hasher = blake3::Hasher::new_keyed(&self.0[kind as usize]);
        for part in parts {
            hasher.update(part);
        }
        Name(*hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for Naming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Naming")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error for text that is not the name of an object (64 hexadecimal digits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParseNameError;

impl fmt::Display for ParseNameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be 64 hexadecimal digits")
    }
}

impl FromStr for Name {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        hex(text).map(Self).ok_or(ParseNameError)
    }
}

/// Parses `2 * N` hexadecimal digits to `N` bytes. Returns `None` for any other text.
pub fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_depends_on_key_kind_and_content() {
        let (a, b) = (Naming::new(&[1; 32]), Naming::new(&[2; 32]));
        let name = a.name(Kind::Page, &[b"ab", b"c"]);
        assert_eq!(name, a.name(Kind::Page, &[b"abc"]));
        assert_ne!(name, a.name(Kind::Unit, &[b"abc"]));
        assert_ne!(name, b.name(Kind::Page, &[b"abc"]));
        assert_eq!(name.to_string().parse(), Ok(name));
        assert_eq!(format!("{a:?}"), "Naming");
        for bad in ["", "0", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32), &"+f".repeat(32)] {
            assert_eq!(bad.parse::<Name>(), Err(ParseNameError), "{bad}");
        }
    }
}
