//! Zstandard with frames cut down to what a page needs: no magic, no content size, no checksum, no dictionary id.

use std::mem::MaybeUninit;
use std::sync::Arc;

use zstd_safe::{CCtx, CDict, CParameter, DCtx, DDict, DParameter, FrameFormat};

use super::dictionary::Dictionary;
use crate::PAGE_BYTES;
use crate::device::{Error, Result};

/// A dictionary in the form in which compressors and decompressors use it. One for all streams: it is several times as
/// large as the dictionary.
pub struct Digest {
    compress: CDict<'static>,
    decompress: DDict<'static>,
}

impl Digest {
    pub fn new(dictionary: &Dictionary, level: i32) -> Result<Arc<Self>> {
        let compress = CDict::try_create(dictionary.bytes(), level).ok_or(Error::NoMemory)?;
        let decompress = DDict::try_create(dictionary.bytes()).ok_or(Error::NoMemory)?;
        Ok(Arc::new(Self { compress, decompress }))
    }

    pub fn bytes(&self) -> usize {
        self.compress.sizeof() + self.decompress.sizeof()
    }
}

/// Working memory of one compressor and decompressor.
pub struct Zstd {
    // Before the digest: fields are dropped in this order, and these two point into it.
    compressor: CCtx<'static>,
    decompressor: DCtx<'static>,
    _digest: Option<Arc<Digest>>,
}

impl Zstd {
    pub fn new(level: i32, digest: Option<Arc<Digest>>) -> Result<Self> {
        let mut compressor = CCtx::try_create().ok_or(Error::NoMemory)?;
        let mut decompressor = DCtx::try_create().ok_or(Error::NoMemory)?;
        let set = [
            CParameter::CompressionLevel(level),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ];
        for parameter in set {
            compressor.set_parameter(parameter).map_err(|_| Error::NoMemory)?;
        }
        decompressor
            .set_parameter(DParameter::Format(FrameFormat::Magicless))
            .map_err(|_| Error::NoMemory)?;
        if let Some(digest) = &digest {
            let digest = shared::outliving(digest);
            compressor.ref_cdict(&digest.compress).map_err(|_| Error::NoMemory)?;
            decompressor.ref_ddict(&digest.decompress).map_err(|_| Error::NoMemory)?;
        }
        Ok(Self { compressor, decompressor, _digest: digest })
    }

    /// Compresses a page into `out`; `None` where it does not fit.
    pub fn compress(&mut self, page: &[u8; PAGE_BYTES], out: &mut [MaybeUninit<u8>]) -> Option<usize> {
        let mut target = Target { out, written: 0 };
        self.compressor.compress2(&mut target, page).ok()
    }

    /// Decompresses an object; false where it is not a whole page.
    pub fn decompress(&mut self, object: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
        self.decompressor.decompress(page.as_mut_slice(), object) == Ok(PAGE_BYTES)
    }

    pub fn bytes(&self) -> usize {
        self.compressor.sizeof() + self.decompressor.sizeof()
    }
}

mod shared {
    #![expect(unsafe_code)]
    // UNSAFETY: contexts refer to a digest that lives beside them in one struct, which the borrow checker cannot see.
    use std::sync::Arc;

    use super::Digest;

    /// The digest, for contexts that are dropped before the caller's `Arc`.
    pub fn outliving(digest: &Arc<Digest>) -> &'static Digest {
        // SAFETY: the heap allocation behind an Arc does not move and lives as long as the Arc, which `Zstd` keeps and
        // drops after the contexts; nobody else gets to see this reference.
        unsafe { &*Arc::as_ptr(digest) }
    }
}

/// Uninitialised memory as the library's kind of target.
struct Target<'a> {
    out: &'a mut [MaybeUninit<u8>],
    written: usize,
}

mod target {
    #![expect(unsafe_code)]
    // UNSAFETY: the library's trait for targets is unsafe to implement.
    use super::Target;

    // SAFETY: capacity and pointer describe the same slice, and `as_slice` shows only what `filled_until` vouched for.
    unsafe impl zstd_safe::WriteBuf for Target<'_> {
        fn as_slice(&self) -> &[u8] {
            // SAFETY: `filled_until` says that so many bytes are initialised.
            unsafe { std::slice::from_raw_parts(self.out.as_ptr().cast(), self.written) }
        }
        fn capacity(&self) -> usize {
            self.out.len()
        }
        fn as_mut_ptr(&mut self) -> *mut u8 {
            self.out.as_mut_ptr().cast()
        }
        // SAFETY: the caller vouches for `n` initialised bytes; they are only noted here.
        unsafe fn filled_until(&mut self, n: usize) {
            self.written = n;
        }
    }
}
