//! Names of objects, derived from their content.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Keyed BLAKE3 hash of a content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; 32]);

/// Kind of content. The same bytes have different names for different kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Pages of a chunk.
    Chunk = 1,
    /// Unit of a chunk.
    Unit = 2,
    /// One page.
    Page = 3,
    /// Map of a segment.
    Map = 4,
    /// Page hashes of a map.
    Hashes = 5,
    /// Manifest of an image.
    Manifest = 6,
    /// Trace of an image.
    Trace = 7,
    /// Seal of a tag.
    Tag = 8,
    /// Check of a key.
    Check = 9,
}

/// Number of kinds, counting the unused value 0.
const KINDS: usize = Kind::Check as usize + 1;

/// Keys for the names of a domain, one for each kind.
///
/// A prefix byte for the kind would be slower: it would shift the content against the 1 KiB blocks that
/// BLAKE3 hashes in parallel, and the hash of a page would take three times as long.
#[derive(Clone)]
pub struct Naming([[u8; 32]; KINDS]);

impl Naming {
    /// Derives the keys from the naming key of a domain.
    pub fn new(key: &[u8; 32]) -> Self {
        let mut kind = 0;
        Self([(); KINDS].map(|()| {
            let of_kind = *blake3::keyed_hash(key, &[kind]).as_bytes();
            kind += 1;
            of_kind
        }))
    }

    /// Returns the name of the concatenated parts.
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

/// Error for text that is not a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoName;

impl fmt::Display for NoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be 64 hexadecimal digits")
    }
}

impl FromStr for Name {
    type Err = NoName;

    fn from_str(text: &str) -> Result<Self, NoName> {
        hex(text).map(Self).ok_or(NoName)
    }
}

/// Parses hexadecimal digits, two for each byte.
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
            assert_eq!(bad.parse::<Name>(), Err(NoName), "{bad}");
        }
    }
}
