//! Zstandard with minimal frames: without magic number, content size, checksum and dictionary id.

use std::mem::MaybeUninit;
use std::sync::Arc;

use zstd_safe::{CCtx, CDict, CParameter, DCtx, DDict, DParameter, FrameFormat};

use super::dictionary::Dictionary;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};

/// A dictionary digested for compressors and decompressors. All streams share it, as it is several
/// times as large as the dictionary.
pub struct Digest {
    // `'static`: each digest has its own copy of the dictionary's content.
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

/// A compressor and a decompressor, which borrow the digested dictionary.
struct Contexts<'d> {
    compressor: CCtx<'d>,
    decompressor: DCtx<'d>,
}

self_cell::self_cell!(
    /// Contexts together with the digested dictionary that they borrow.
    struct Joined {
        owner: Option<Arc<Digest>>,
        #[not_covariant]
        dependent: Contexts,
    }
);

/// Working memory of one compressor and one decompressor. The value has the size of a pointer: the
/// contexts are on the heap.
pub struct Zstd(Joined);

impl<'d> Contexts<'d> {
    fn new(level: i32, digest: Option<&'d Digest>) -> Result<Self> {
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
        if let Some(digest) = digest {
            compressor.ref_cdict(&digest.compress).map_err(|_| Error::NoMemory)?;
            decompressor.ref_ddict(&digest.decompress).map_err(|_| Error::NoMemory)?;
        }
        Ok(Self { compressor, decompressor })
    }
}

impl Zstd {
    pub fn new(level: i32, digest: Option<Arc<Digest>>) -> Result<Self> {
        Joined::try_new(digest, |digest| Contexts::new(level, digest.as_deref())).map(Self)
    }

    /// Compresses a page into `out` and returns the size in bytes; `None` if the result does not
    /// fit.
    pub fn compress(&mut self, page: &[u8; PAGE_BYTES], out: &mut [MaybeUninit<u8>]) -> Option<usize> {
        let mut target = Target { out, written: 0 };
        self.0.with_dependent_mut(|_, contexts| contexts.compressor.compress2(&mut target, page).ok())
    }

    /// Decompresses the compressed page `object` into `page`; returns false if the result is not a
    /// whole page.
    pub fn decompress(&mut self, object: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
        let page = page.as_mut_slice();
        self.0.with_dependent_mut(|_, contexts| contexts.decompressor.decompress(page, object))
            == Ok(PAGE_BYTES)
    }

    pub fn bytes(&self) -> usize {
        self.0.with_dependent(|_, contexts| contexts.compressor.sizeof() + contexts.decompressor.sizeof())
    }
}

/// Uninitialised memory as an output buffer of `zstd_safe`.
struct Target<'a> {
    out: &'a mut [MaybeUninit<u8>],
    written: usize,
}

mod target {
    #![expect(unsafe_code)]
    // UNSAFETY: the library's trait for targets is unsafe to implement.
    use super::Target;

    // SAFETY: capacity and pointer describe the same slice, and `as_slice` shows only bytes
    // reported to `filled_until`.
    unsafe impl zstd_safe::WriteBuf for Target<'_> {
        fn as_slice(&self) -> &[u8] {
            // SAFETY: `filled_until` was told that this many bytes are initialised.
            unsafe { std::slice::from_raw_parts(self.out.as_ptr().cast(), self.written) }
        }
        fn capacity(&self) -> usize {
            self.out.len()
        }
        fn as_mut_ptr(&mut self) -> *mut u8 {
            self.out.as_mut_ptr().cast()
        }
        // SAFETY: the caller guarantees `n` initialised bytes; only the number is stored here.
        unsafe fn filled_until(&mut self, n: usize) {
            self.written = n;
        }
    }
}
