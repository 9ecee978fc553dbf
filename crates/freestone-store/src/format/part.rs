//! Common format of chunks and of descriptions of images (such as maps). An object has a 32-byte header and
//! parts, which are compressed separately, and encrypted if the domain is.

use std::cell::RefCell;

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zstd_safe::{CCtx, DCtx};

use super::domain::Domain;
use super::name::Name;
use super::seal::{self, NONCE_BYTES, ObjectKey, TAG_BYTES};

/// zstd compression level. Higher levels compress more slowly than a fast network link sends.
const LEVEL: i32 = 3;

/// Header of a stored chunk or description.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct Header {
    magic: [u8; 8],
    bytes: U32,
    sealed: U32,
    nonce: [u8; NONCE_BYTES],
    zero: [u8; 4],
}

/// Size of the header in bytes.
pub const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 32);

/// Reason why stored bytes are not the expected object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// The size, the header or the kind of the object is wrong.
    #[error("wrong size or header")]
    Shape,
    /// The content cannot be unpacked, or its hash does not match the name.
    #[error("the content does not match the name")]
    Content,
    /// The object is encrypted but the domain is not, or the reverse.
    #[error("only one of the object and its store is encrypted")]
    Sealing,
}

impl Header {
    /// Splits a stored object into its header and the rest. Fails if the header is invalid or has another
    /// magic number.
    pub fn read(object: &[u8], magic: [u8; 8]) -> Result<(Self, &[u8]), PartError> {
        let (header, rest) = Self::read_from_prefix(object).map_err(|_| PartError::Shape)?;
        let is_sound = header.magic == magic && header.zero == [0; 4] && header.sealed.get() <= 1;
        if is_sound { Ok((header, rest)) } else { Err(PartError::Shape) }
    }

    /// Returns the uncompressed size of the content in bytes, as the header states it.
    pub fn bytes(&self) -> usize {
        self.bytes.get() as usize
    }
}

/// Key and nonce that encrypt the parts of one object. The key is `None` if the domain is not encrypted.
pub struct Packing {
    key: Option<ObjectKey>,
    nonce: [u8; NONCE_BYTES],
}

impl Packing {
    /// Creates the key and a random nonce for a new object. Returns `None` if either cannot be created.
    pub fn new(domain: &Domain, name: &Name) -> Option<Self> {
        Some(match &domain.sealing {
            Some(sealing) => Self { key: Some(sealing.key(name).ok()?), nonce: seal::nonce().ok()? },
            None => Self { key: None, nonce: [0; NONCE_BYTES] },
        })
    }

    /// Returns the key and the nonce of an existing object with this header.
    pub fn of(domain: &Domain, name: &Name, header: &Header) -> Result<Self, PartError> {
        let key = match (&domain.sealing, header.sealed.get()) {
            (None, 0) => None,
            (Some(sealing), 1) => Some(sealing.key(name).map_err(|_| PartError::Sealing)?),
            _ => return Err(PartError::Sealing),
        };
        Ok(Self { key, nonce: header.nonce })
    }

    /// Returns the header of an object whose uncompressed content has `bytes` bytes.
    pub fn header(&self, magic: [u8; 8], bytes: usize) -> Header {
        let (bytes, sealed) = (U32::new(bytes as u32), U32::new(u32::from(self.key.is_some())));
        Header { magic, bytes, sealed, nonce: self.nonce, zero: [0; 4] }
    }

    /// Returns the number of bytes that encryption adds to a part, which is 0 without encryption.
    pub fn tag_bytes(&self) -> usize {
        if self.key.is_some() { TAG_BYTES } else { 0 }
    }

    /// Compresses and encrypts the part with the number `part`. Returns the stored form, or `None` if
    /// encryption fails.
    pub fn pack(&self, part: u32, content: &[u8]) -> Option<Vec<u8>> {
        let mut stored = compress(content).unwrap_or_else(|| content.to_vec());
        if let Some(key) = &self.key {
            key.seal(self.nonce, part, &mut stored).ok()?;
        }
        Some(stored)
    }

    /// Decrypts and decompresses a part into `content`, whose size must be the uncompressed size of the part.
    pub fn unpack(&self, part: u32, stored: &[u8], content: &mut [u8]) -> Result<(), PartError> {
        let mut opened = Vec::new();
        let body = match &self.key {
            None => stored,
            Some(key) => {
                opened.extend_from_slice(stored);
                key.open(self.nonce, part, &mut opened).map_err(|_| PartError::Content)?
            }
        };
        if body.len() == content.len() {
            content.copy_from_slice(body);
            return Ok(());
        }
        if decompress(body, content) { Ok(()) } else { Err(PartError::Content) }
    }
}

thread_local! {
    static COMPRESS: RefCell<Option<CCtx<'static>>> = const { RefCell::new(None) };
    static DECOMPRESS: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

/// Compresses `bytes` to a zstd frame. Returns `None` if the frame is not shorter than `bytes` or compression
/// fails.
fn compress(bytes: &[u8]) -> Option<Vec<u8>> {
    COMPRESS.with_borrow_mut(|context| {
        let context = match context {
            Some(context) => context,
            None => context.insert(CCtx::try_create()?),
        };
        let mut out = Vec::with_capacity(bytes.len());
        // Compression fails if the frame does not fit the capacity of `out`.
        context.compress(&mut out, bytes, LEVEL).ok()?;
        (out.len() < bytes.len()).then_some(out)
    })
}

/// Decompresses a zstd frame into `out`. Returns false if the frame is invalid or its content does not
/// exactly fill `out`.
fn decompress(bytes: &[u8], out: &mut [u8]) -> bool {
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
