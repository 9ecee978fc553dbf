//! Encryption of what is stored, where a domain has it: AES-256-GCM, with a key for each object that
//! follows from its name, and a random nonce: two writers of the same content may have compressed it
//! differently.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::name::Name;

/// What sealing adds to the bytes.
pub const TAG_BYTES: usize = 16;
/// Bytes of a nonce.
pub const NONCE_BYTES: usize = NONCE_LEN;

/// The key from which those of the objects follow.
#[derive(Clone)]
pub struct Sealing(pub(super) [u8; 32]);

/// The key of one object.
pub struct ObjectKey(LessSafeKey);

/// Why something was not sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl Sealing {
    /// The key of an object.
    pub fn key(&self, name: &Name) -> Result<ObjectKey, Broken> {
        let key = blake3::keyed_hash(&self.0, &name.0);
        let key = UnboundKey::new(&AES_256_GCM, key.as_bytes()).map_err(|_| Broken)?;
        Ok(ObjectKey(LessSafeKey::new(key)))
    }
}

/// Another nonce.
pub fn nonce() -> Result<[u8; NONCE_BYTES], Broken> {
    let mut nonce = [0; NONCE_BYTES];
    SystemRandom::new().fill(&mut nonce).map_err(|_| Broken)?;
    Ok(nonce)
}

/// That of a part of an object.
fn of_part(mut nonce: [u8; NONCE_BYTES], part: u32) -> Nonce {
    for (byte, part) in nonce.iter_mut().zip(part.to_le_bytes()) {
        *byte ^= part;
    }
    Nonce::assume_unique_for_key(nonce)
}

impl ObjectKey {
    /// Encrypts a part of an object in place; it is [`TAG_BYTES`] longer then.
    pub fn seal(&self, nonce: [u8; NONCE_BYTES], part: u32, bytes: &mut Vec<u8>) -> Result<(), Broken> {
        self.0.seal_in_place_append_tag(of_part(nonce, part), Aad::empty(), bytes).map_err(|_| Broken)
    }

    /// Decrypts it in place.
    pub fn open<'a>(
        &self,
        nonce: [u8; NONCE_BYTES],
        part: u32,
        bytes: &'a mut [u8],
    ) -> Result<&'a [u8], Broken> {
        let opened = self.0.open_in_place(of_part(nonce, part), Aad::empty(), bytes);
        opened.map(|bytes| &*bytes).map_err(|_| Broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_is_opened_with_the_same_key_nonce_and_part_only() {
        let sealing = Sealing([7; 32]);
        let key = sealing.key(&Name([1; 32])).unwrap();
        let nonce = nonce().unwrap();
        let mut sealed = b"some bytes".to_vec();
        key.seal(nonce, 3, &mut sealed).unwrap();
        assert_eq!(sealed.len(), 10 + TAG_BYTES);
        assert_ne!(&sealed[..10], b"some bytes");
        assert_eq!(key.open(nonce, 3, &mut sealed.clone()), Ok(&b"some bytes"[..]));
        assert_eq!(key.open(nonce, 4, &mut sealed.clone()), Err(Broken));
        assert_eq!(key.open([0; NONCE_BYTES], 3, &mut sealed.clone()), Err(Broken));
        let other = sealing.key(&Name([2; 32])).unwrap();
        assert_eq!(other.open(nonce, 3, &mut sealed.clone()), Err(Broken));
        sealed[0] ^= 1;
        assert_eq!(key.open(nonce, 3, &mut sealed), Err(Broken));
    }
}
