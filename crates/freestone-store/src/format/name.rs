//! Names that follow from content.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The keyed hash of some content: BLAKE3 with the key of the domain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; 32]);

/// What a content is. The same bytes have another name as something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Pages.
    Chunk = 1,
    /// Part of a chunk.
    Unit = 2,
    /// One page.
    Page = 3,
    /// Where the pages of a segment lie.
    Map = 4,
    /// The hashes of those pages.
    Hashes = 5,
    /// An image.
    Manifest = 6,
    /// What was read first.
    Trace = 7,
    /// What a tag says.
    Tag = 8,
    /// Whether a key is the right one.
    Check = 9,
}

/// As many as there are, and 0.
const KINDS: usize = Kind::Check as usize + 1;

/// The keys of a domain's names, one for each kind. With a byte for the kind before the content, that would lie
/// across the pieces of 1 KiB that BLAKE3 hashes side by side: a page takes three times as long.
#[derive(Clone)]
pub struct Naming([[u8; 32]; KINDS]);

impl Naming {
    /// From the key of the names.
    pub fn new(key: &[u8; 32]) -> Self {
        let mut kind = 0;
        Self([(); KINDS].map(|()| {
            let of_kind = *blake3::keyed_hash(key, &[kind]).as_bytes();
            kind += 1;
            of_kind
        }))
    }

    /// The name of what consists of these parts.
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

/// Not a name.
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

/// Bytes that are written as hexadecimal digits, two for each.
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
    fn a_name_depends_on_key_kind_and_content() {
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
