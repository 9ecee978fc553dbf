//! Tags: small objects with a name of their own, such as `latest`, that refer to an image. A tag is updated
//! only if it is unchanged since it was read.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::domain::Domain;
use super::name::{Kind, Name};
use super::{VERSION, read};

/// Maximum length of the name of a tag in bytes.
pub const TAG_BYTES_MAX: usize = 128;
/// Maximum size of the stored object of a tag in bytes.
pub const BYTES_MAX: u64 = 4096;
/// Name of the default tag.
pub const LATEST: &str = "latest";

/// Content of a tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    format: u32,
    /// Name of the image (of its manifest) that the tag refers to.
    pub manifest: Name,
    /// Number of times that the tag was set since it was created.
    pub generation: u64,
    /// Time of the last push in seconds since 1970, by the clock of the pushing host.
    pub pushed: u64,
    /// Random ID of the push. If the response to a write is lost, the writer reads the tag and recognizes its
    /// own write by this ID.
    push: Uuid,
    /// Keyed hash of the other fields and of the name of the tag. In a domain with a key file this hash
    /// detects forged tags.
    seal: Name,
}

impl Tag {
    /// Creates the content of the tag `name`, with a new push ID and seal.
    pub fn new(domain: &Domain, name: &str, manifest: Name, generation: u64, pushed: u64) -> Self {
        let push = crate::rt::unique_id();
        let mut tag = Self { format: VERSION, manifest, generation, pushed, push, seal: manifest };
        tag.seal = tag.compute_seal(domain, name);
        tag
    }

    fn compute_seal(&self, domain: &Domain, name: &str) -> Name {
        let Self { format, manifest, generation, pushed, push, seal: _ } = self;
        let numbers = [u64::from(*format), *generation, *pushed].map(u64::to_le_bytes);
        domain
            .naming
            .name(Kind::Tag, &[numbers.as_flattened(), &manifest.0, push.as_bytes(), name.as_bytes()])
    }

    /// Parses the tag `name` and verifies its seal. The error text is a sentence fragment about the tag.
    pub fn parse(domain: &Domain, name: &str, bytes: &[u8]) -> Result<Self, String> {
        let tag: Self = read(bytes).map_err(|why| why.to_string())?;
        if tag.seal == tag.compute_seal(domain, name) {
            Ok(tag)
        } else {
            Err("it was not made with the key of the store, or for another tag".into())
        }
    }

    /// Encodes the tag as JSON.
    pub fn bytes(&self) -> Vec<u8> {
        // Serialization cannot fail, as all values are numbers and strings.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Returns true for a valid name of a tag: letters, digits, `.`, `_` and `-`, starting with a letter or
/// digit.
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
    fn tag_with_wrong_seal_is_refused() {
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
    fn tag_names_are_restricted() {
        assert!(is_name("latest") && is_name("1.2_x-y") && is_name(&"a".repeat(TAG_BYTES_MAX)));
        for bad in ["", ".", "..", "-a", "a/b", "a b", "ä", "a:b", &"a".repeat(TAG_BYTES_MAX + 1)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
