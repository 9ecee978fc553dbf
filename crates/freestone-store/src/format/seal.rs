//! Encryption of objects with AES-256-GCM. Each object has a key derived from its name. The nonce is random:
//! two writers may compress the same content differently, and one key and nonce must not encrypt two texts.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::name::Name;

/// Size in bytes of the authentication tag that encryption adds to each part of an object.
pub const TAG_BYTES: usize = 16;
/// Size of a nonce in bytes.
pub const NONCE_BYTES: usize = NONCE_LEN;

/// Key of an encrypted domain, from which the keys of its objects derive.
#[derive(Clone)]
pub struct Sealing(pub(super) [u8; 32]);

/// Encryption key of one object.
pub struct ObjectKey(LessSafeKey);

/// Failure of encryption, decryption or random number generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealError;

impl Sealing {
    /// Derives the key of an object from its name.
    pub fn key(&self, name: &Name) -> Result<ObjectKey, SealError> {
        let key = blake3::keyed_hash(&self.0, &name.0);
        let key = UnboundKey::new(&AES_256_GCM, key.as_bytes()).map_err(|_| SealError)?;
        Ok(ObjectKey(LessSafeKey::new(key)))
    }
}

/// Returns a random nonce for a new object.
pub fn nonce() -> Result<[u8; NONCE_BYTES], SealError> {
    let mut nonce = [0; NONCE_BYTES];
    SystemRandom::new().fill(&mut nonce).map_err(|_| SealError)?;
    Ok(nonce)
}

/// Returns the nonce of a part: the exclusive or of the nonce of the object and the number of the part.
fn part_nonce(mut nonce: [u8; NONCE_BYTES], part: u32) -> Nonce {
    for (byte, part) in nonce.iter_mut().zip(part.to_le_bytes()) {
        *byte ^= part;
    }
    Nonce::assume_unique_for_key(nonce)
}

impl ObjectKey {
    /// Encrypts a part of an object in place, which makes it [`TAG_BYTES`] longer.
    pub fn seal(&self, nonce: [u8; NONCE_BYTES], part: u32, bytes: &mut Vec<u8>) -> Result<(), SealError> {
        self.0.seal_in_place_append_tag(part_nonce(nonce, part), Aad::empty(), bytes).map_err(|_| SealError)
    }

    /// Decrypts a part of an object in place. Returns the content without the authentication tag. Fails if
    /// the part was changed.
    pub fn open<'a>(
        &self,
        nonce: [u8; NONCE_BYTES],
        part: u32,
        bytes: &'a mut [u8],
    ) -> Result<&'a [u8], SealError> {
        let opened = self.0.open_in_place(part_nonce(nonce, part), Aad::empty(), bytes);
        opened.map(|bytes| &*bytes).map_err(|_| SealError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_part_opens_only_with_same_key_nonce_part() {
        let sealing = Sealing([7; 32]);
        let key = sealing.key(&Name([1; 32])).unwrap();
        let nonce = nonce().unwrap();
        let mut sealed = b"some bytes".to_vec();
        key.seal(nonce, 3, &mut sealed).unwrap();
        assert_eq!(sealed.len(), 10 + TAG_BYTES);
        assert_ne!(&sealed[..10], b"some bytes");
        assert_eq!(key.open(nonce, 3, &mut sealed.clone()), Ok(&b"some bytes"[..]));
        assert_eq!(key.open(nonce, 4, &mut sealed.clone()), Err(SealError));
        assert_eq!(key.open([0; NONCE_BYTES], 3, &mut sealed.clone()), Err(SealError));
        let other = sealing.key(&Name([2; 32])).unwrap();
        assert_eq!(other.open(nonce, 3, &mut sealed.clone()), Err(SealError));
        sealed[0] ^= 1;
        assert_eq!(key.open(nonce, 3, &mut sealed), Err(SealError));
    }
}
