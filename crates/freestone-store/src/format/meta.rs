//! What describes images: maps, hashes, manifests, traces. One object each, compressed, and encrypted
//! where the domain is.
//!
//! ```text
//!  0  8  "FSTMETA1"
//!  8  4  bytes of the content, little endian
//! 12  4  1 where it is encrypted, else 0
//! 16 12  nonce, or zeroes
//! 28  4  zeroes
//! 32     the content: a zstd frame, or as it is where that is not longer
//! ```

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::chunk::{Damaged, compressed, decompressed};
use super::domain::Domain;
use super::name::{Kind, Name};
use super::seal::{self, TAG_BYTES};

const MAGIC: [u8; 8] = *b"FSTMETA1";
/// Most bytes of a content.
pub const BYTES_MAX: usize = 32 << 20;
/// Most bytes of an object.
pub const STORED_BYTES_MAX: u64 = (HEADER_BYTES + BYTES_MAX + TAG_BYTES) as u64;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    bytes: U32,
    sealed: U32,
    nonce: [u8; seal::NONCE_BYTES],
    zero: [u8; 4],
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 32);

/// The name of a content, and its object; `None` where it is too large, or there is no random number.
pub fn stored(domain: &Domain, kind: Kind, content: &[u8]) -> Option<(Name, Vec<u8>)> {
    if content.len() > BYTES_MAX {
        return None;
    }
    let name = domain.naming.name(kind, &[content]);
    let mut body = compressed(content).unwrap_or_else(|| content.to_vec());
    let mut nonce = [0; seal::NONCE_BYTES];
    if let Some(sealing) = &domain.sealing {
        nonce = seal::nonce().ok()?;
        sealing.key(&name).ok()?.seal(nonce, 0, &mut body).ok()?;
    }
    let header = Header {
        magic: MAGIC,
        bytes: U32::new(content.len() as u32),
        sealed: U32::new(u32::from(domain.sealing.is_some())),
        nonce,
        zero: [0; 4],
    };
    Some((name, [header.as_bytes(), &body].concat()))
}

/// The content of an object, verified. `most` bounds the memory that it may take.
pub fn content(
    domain: &Domain,
    kind: Kind,
    name: &Name,
    object: &[u8],
    most: usize,
) -> Result<Vec<u8>, Damaged> {
    let (header, body) = Header::read_from_prefix(object).map_err(|_| Damaged::Shape)?;
    let bytes = header.bytes.get() as usize;
    if header.magic != MAGIC
        || header.zero != [0; 4]
        || bytes > most.min(BYTES_MAX)
        || header.sealed.get() > 1
    {
        return Err(Damaged::Shape);
    }
    let mut opened = Vec::new();
    let body = match (&domain.sealing, header.sealed.get()) {
        (None, 0) => body,
        (Some(sealing), 1) => {
            let key = sealing.key(name).map_err(|_| Damaged::Sealing)?;
            opened.extend_from_slice(body);
            key.open(header.nonce, 0, &mut opened).map_err(|_| Damaged::Content)?
        }
        _ => return Err(Damaged::Sealing),
    };
    let content = if body.len() == bytes {
        body.to_vec()
    } else {
        let mut content = vec![0; bytes];
        if !decompressed(body, &mut content) {
            return Err(Damaged::Content);
        }
        content
    };
    if domain.naming.name(kind, &[&content]) == *name { Ok(content) } else { Err(Damaged::Content) }
}

#[cfg(test)]
mod tests {
    use super::super::domain::{GRACE, Secret};
    use super::*;

    #[test]
    fn a_content_comes_back_and_nothing_is_believed() {
        let secret = Secret::parse(&"5".repeat(64));
        for domain in [Domain::new(None, false, GRACE).0, Domain::new(secret.as_ref(), true, GRACE).0] {
            for content in [vec![], b"x".to_vec(), vec![7; 100_000]] {
                let (name, object) = stored(&domain, Kind::Map, &content).unwrap();
                let read = |kind, object: &[u8], most| super::content(&domain, kind, &name, object, most);
                assert_eq!(read(Kind::Map, &object, BYTES_MAX).unwrap(), content);
                assert_eq!(read(Kind::Manifest, &object, BYTES_MAX), Err(Damaged::Content));
                if !content.is_empty() {
                    assert_eq!(read(Kind::Map, &object, content.len() - 1), Err(Damaged::Shape));
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
