//! What chunks and what describes images have in common: the 32 bytes at the beginning of an object, and
//! parts that are compressed each for itself, and encrypted where the domain is.

use std::cell::RefCell;

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zstd_safe::{CCtx, DCtx};

use super::domain::Domain;
use super::name::Name;
use super::seal::{self, NONCE_BYTES, ObjectKey, TAG_BYTES};

/// A usual level: what compresses better is slower than a fast link.
const LEVEL: i32 = 3;

/// The beginning of an object.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct Header {
    magic: [u8; 8],
    bytes: U32,
    sealed: U32,
    nonce: [u8; NONCE_BYTES],
    zero: [u8; 4],
}

/// Bytes of that.
pub const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 32);

/// Why bytes are not the object that was meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Shorter or longer than it says, or no such object at all.
    #[error("it is no chunk")]
    Shape,
    /// It is not what its name says.
    #[error("its content is not what its name says")]
    Content,
    /// Encrypted, and the domain is not, or the other way round.
    #[error("it is encrypted otherwise than its domain")]
    Sealing,
}

impl Header {
    /// From the beginning of an object, and what follows it.
    pub fn read(object: &[u8], magic: [u8; 8]) -> Result<(Self, &[u8]), Damaged> {
        let (header, rest) = Self::read_from_prefix(object).map_err(|_| Damaged::Shape)?;
        let is_sound = header.magic == magic && header.zero == [0; 4] && header.sealed.get() <= 1;
        if is_sound { Ok((header, rest)) } else { Err(Damaged::Shape) }
    }

    /// Bytes of the content, as the object says.
    pub fn bytes(&self) -> usize {
        self.bytes.get() as usize
    }
}

/// How the parts of one object are packed.
pub struct Packing {
    key: Option<ObjectKey>,
    nonce: [u8; NONCE_BYTES],
}

impl Packing {
    /// For an object that is written; `None` where there is no random number.
    pub fn new(domain: &Domain, name: &Name) -> Option<Self> {
        Some(match &domain.sealing {
            Some(sealing) => Self { key: Some(sealing.key(name).ok()?), nonce: seal::nonce().ok()? },
            None => Self { key: None, nonce: [0; NONCE_BYTES] },
        })
    }

    /// As an object says.
    pub fn of(domain: &Domain, name: &Name, header: &Header) -> Result<Self, Damaged> {
        let key = match (&domain.sealing, header.sealed.get()) {
            (None, 0) => None,
            (Some(sealing), 1) => Some(sealing.key(name).map_err(|_| Damaged::Sealing)?),
            _ => return Err(Damaged::Sealing),
        };
        Ok(Self { key, nonce: header.nonce })
    }

    /// The beginning of the object.
    pub fn header(&self, magic: [u8; 8], bytes: usize) -> Header {
        let (bytes, sealed) = (U32::new(bytes as u32), U32::new(u32::from(self.key.is_some())));
        Header { magic, bytes, sealed, nonce: self.nonce, zero: [0; 4] }
    }

    /// What it adds to a part that does not compress.
    pub fn tag_bytes(&self) -> usize {
        if self.key.is_some() { TAG_BYTES } else { 0 }
    }

    /// A part as it is stored; `None` where it cannot be encrypted.
    pub fn pack(&self, part: u32, content: &[u8]) -> Option<Vec<u8>> {
        let mut stored = compressed(content).unwrap_or_else(|| content.to_vec());
        if let Some(key) = &self.key {
            key.seal(self.nonce, part, &mut stored).ok()?;
        }
        Some(stored)
    }

    /// The reverse: as many bytes as `content` has.
    pub fn unpack(&self, part: u32, stored: &[u8], content: &mut [u8]) -> Result<(), Damaged> {
        let mut opened = Vec::new();
        let body = match &self.key {
            None => stored,
            Some(key) => {
                opened.extend_from_slice(stored);
                key.open(self.nonce, part, &mut opened).map_err(|_| Damaged::Content)?
            }
        };
        if body.len() == content.len() {
            content.copy_from_slice(body);
            return Ok(());
        }
        if decompressed(body, content) { Ok(()) } else { Err(Damaged::Content) }
    }
}

thread_local! {
    static COMPRESS: RefCell<Option<CCtx<'static>>> = const { RefCell::new(None) };
    static DECOMPRESS: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

/// A zstd frame; `None` where that is not shorter.
fn compressed(bytes: &[u8]) -> Option<Vec<u8>> {
    COMPRESS.with_borrow_mut(|context| {
        let context = match context {
            Some(context) => context,
            None => context.insert(CCtx::try_create()?),
        };
        let mut out = Vec::with_capacity(bytes.len());
        // Fails where it would not fit.
        context.compress(&mut out, bytes, LEVEL).ok()?;
        (out.len() < bytes.len()).then_some(out)
    })
}

/// The reverse: exactly as many bytes as `out` has, or false.
fn decompressed(bytes: &[u8], out: &mut [u8]) -> bool {
    DECOMPRESS.with_borrow_mut(|context| {
        let context = match context {
            Some(context) => context,
            None => match DCtx::try_create() {
                Some(new) => context.insert(new),
                None => return false,
            },
        };
        let want = out.len();
        context.decompress(out, bytes) == Ok(want)
    })
}
