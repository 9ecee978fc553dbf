//! A tag: one object that says which image has that name now. It is the only thing in a store that is
//! changed, and only where it still is what was read.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::domain::Domain;
use super::name::{Kind, Name};
use super::{VERSION, read};

/// Longest tag in bytes.
pub const TAG_BYTES_MAX: usize = 128;
/// Most bytes of the object.
pub const BYTES_MAX: u64 = 4096;
/// The tag that is meant where none is said.
pub const LATEST: &str = "latest";

/// What a tag says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    format: u32,
    /// The image.
    pub manifest: Name,
    /// How often the tag was set.
    pub generation: u64,
    /// When, in seconds since 1970, by the clock of who did.
    pub pushed: u64,
    /// No other push has this one, so who does not get an answer can tell whether it was written.
    push: Uuid,
    /// Of all that: in a domain with a key file nobody else can have made it.
    seal: Name,
}

impl Tag {
    /// What a tag of that name is to say next.
    pub fn new(domain: &Domain, name: &str, manifest: Name, generation: u64, pushed: u64) -> Self {
        let push = crate::rt::unique_id();
        let mut tag = Self { format: VERSION, manifest, generation, pushed, push, seal: manifest };
        tag.seal = tag.sealed(domain, name);
        tag
    }

    fn sealed(&self, domain: &Domain, name: &str) -> Name {
        let Self { format, manifest, generation, pushed, push, seal: _ } = self;
        let numbers = [u64::from(*format), *generation, *pushed].map(u64::to_le_bytes);
        domain
            .naming
            .name(Kind::Tag, &[numbers.as_flattened(), &manifest.0, push.as_bytes(), name.as_bytes()])
    }

    /// From the bytes of the object; the error is half a sentence.
    pub fn parse(domain: &Domain, name: &str, bytes: &[u8]) -> Result<Self, String> {
        let tag: Self = read(bytes).map_err(|why| why.to_string())?;
        if tag.seal == tag.sealed(domain, name) {
            Ok(tag)
        } else {
            Err("it was not made with the key of the store, or for another tag".into())
        }
    }

    /// As it is written.
    pub fn bytes(&self) -> Vec<u8> {
        // Its values are numbers and text.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Whether a tag may be called so: letters, digits, `.`, `_` and `-`, the first one no sign.
pub fn is_name(text: &str) -> bool {
    let is_in = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=TAG_BYTES_MAX).contains(&text.len())
        && text.bytes().all(is_in)
        && text.as_bytes()[0].is_ascii_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::super::domain::GRACE;
    use super::*;

    #[test]
    fn only_the_holder_of_the_key_makes_one() {
        let (domain, _) = Domain::new(None, false, GRACE);
        let tag = Tag::new(&domain, "v1", Name([3; 32]), 4, 5);
        let bytes = tag.bytes();
        assert_eq!(Tag::parse(&domain, "v1", &bytes), Ok(tag.clone()));
        assert!(Tag::parse(&domain, "v2", &bytes).is_err());
        assert!(Tag::parse(&Domain::new(None, false, GRACE).0, "v1", &bytes).is_err());
        let text = String::from_utf8(bytes).unwrap();
        for (from, to) in [("\"generation\":4", "\"generation\":3"), ("\"format\":2", "\"format\":3")] {
            assert!(Tag::parse(&domain, "v1", text.replace(from, to).as_bytes()).is_err(), "{from}");
        }
        assert!(text.len() < BYTES_MAX as usize);
        assert_ne!(Tag::new(&domain, "v1", Name([3; 32]), 4, 5), tag);
    }

    #[test]
    fn names_are_plain() {
        assert!(is_name("latest") && is_name("1.2_x-y") && is_name(&"a".repeat(TAG_BYTES_MAX)));
        for bad in ["", ".", "..", "-a", "a/b", "a b", "ä", "a:b", &"a".repeat(TAG_BYTES_MAX + 1)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
