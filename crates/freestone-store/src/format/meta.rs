//! Storage of descriptions of images: maps, page hashes, manifests, traces. Each description is one object,
//! which is compressed, and encrypted if the domain is.
//!
//! ```text
//!  0  8  "FSTMETA1"
//!  8  4  uncompressed size of the content in bytes, little endian
//! 12  4  1 if encrypted, else 0
//! 16 12  nonce if encrypted, else zeroes
//! 28  4  zeroes
//! 32     the content: a zstd frame, or raw if a frame is not shorter
//! ```

use zerocopy::IntoBytes as _;

use super::domain::Domain;
use super::name::{Kind, Name};
use super::part::{HEADER_BYTES, Header, Packing, PartError};
use super::seal::TAG_BYTES;

const MAGIC: [u8; 8] = *b"FSTMETA1";
/// Maximum uncompressed size of a description in bytes.
pub const BYTES_MAX: usize = 32 << 20;
/// Maximum size of the stored object of a description in bytes.
pub const STORED_BYTES_MAX: u64 = (HEADER_BYTES + BYTES_MAX + TAG_BYTES) as u64;

/// Returns the name and the stored object of a description, or `None` if the description is larger than
/// [`BYTES_MAX`] or encryption fails.
pub fn stored(domain: &Domain, kind: Kind, content: &[u8]) -> Option<(Name, Vec<u8>)> {
    if content.len() > BYTES_MAX {
        return None;
    }
    let name = domain.naming.name(kind, &[content]);
    let packing = Packing::new(domain, &name)?;
    let body = packing.pack(0, content)?;
    Some((name, [packing.header(MAGIC, content.len()).as_bytes(), &body].concat()))
}

/// Unpacks and verifies the stored object of a description. `most` is the maximum uncompressed size in bytes,
/// which limits memory use.
pub fn content(
    domain: &Domain,
    kind: Kind,
    name: &Name,
    object: &[u8],
    most: usize,
) -> Result<Vec<u8>, PartError> {
    freestone_core::trail::step!();
    let (header, body) = Header::read(object, MAGIC)?;
    if header.bytes() > most.min(BYTES_MAX) {
        return Err(PartError::Shape);
    }
    let mut content = vec![0; header.bytes()];
    Packing::of(domain, name, &header)?.unpack(0, body, &mut content)?;
    if domain.naming.name(kind, &[&content]) == *name { Ok(content) } else { Err(PartError::Content) }
}

#[cfg(test)]
mod tests {
    use super::super::domain::{GRACE, Secret};
    use super::*;

    #[test]
    fn meta_round_trip_detects_changes() {
        let secret = Secret::parse(&"5".repeat(64));
        for domain in [Domain::new(None, false, GRACE).0, Domain::new(secret.as_ref(), true, GRACE).0] {
            for content in [vec![], b"x".to_vec(), vec![7; 100_000]] {
                let (name, object) = stored(&domain, Kind::Map, &content).unwrap();
                let read = |kind, object: &[u8], most| super::content(&domain, kind, &name, object, most);
                assert_eq!(read(Kind::Map, &object, BYTES_MAX).unwrap(), content);
                assert_eq!(read(Kind::Manifest, &object, BYTES_MAX), Err(PartError::Content));
                if !content.is_empty() {
                    assert_eq!(read(Kind::Map, &object, content.len() - 1), Err(PartError::Shape));
                }
                for at in 0..object.len() {
                    let mut wrong = object.clone();
                    wrong[at] ^= 0x41;
                    let same = read(Kind::Map, &wrong, BYTES_MAX).is_ok_and(|read| read == content);
                    let is_free = domain.sealing.is_none() && (16..28).contains(&at);
                    assert_eq!(same, is_free, "{at}");
                    assert!(read(Kind::Map, &object[..at], BYTES_MAX).is_err(), "{at}");
                }
            }
        }
        let (domain, _) = Domain::new(None, false, GRACE);
        assert!(stored(&domain, Kind::Map, &vec![0; BYTES_MAX + 1]).is_none());
    }
}
