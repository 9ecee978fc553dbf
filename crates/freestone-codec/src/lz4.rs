//! Functions of liblz4 that lz4-sys does not declare: decompression, and compression at high levels.
//!
//! [`PageCompressor`](super::lz4_page::PageCompressor) compresses at the fast levels. liblz4 was chosen over `lz4_flex`
//! 0.14 after measuring both on pages: liblz4 decompresses pages of real files 7 to 12 % faster. `lz4_flex` decompresses
//! pages of noise and zeroes twice as fast, but only without bounds checks. `LZ4_decompress_safe_partial` for the whole
//! page reaches that speed with bounds checks.
#![expect(unsafe_code)]
// UNSAFETY: calls into a C library.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use freestone_core::PAGE_BYTES;

// Links liblz4, which the crate lz4-sys builds.
use lz4_sys as _;

unsafe extern "C" {
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_compress_HC_extStateHC(
        state: *mut c_void,
        source: *const c_char,
        target: *mut c_char,
        source_size: c_int,
        target_capacity: c_int,
        level: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_partial(
        source: *const c_char,
        target: *mut c_char,
        source_size: c_int,
        target_size: c_int,
        target_capacity: c_int,
    ) -> c_int;
}

fn state(bytes: c_int) -> Box<[u64]> {
    vec![0; usize::try_from(bytes).unwrap_or(0).div_ceil(8)].into()
}

pub struct Lz4hc {
    state: Box<[u64]>,
    level: c_int,
}

impl Lz4hc {
    pub fn new(level: i32) -> Self {
        // SAFETY: returns a constant.
        Self { state: state(unsafe { LZ4_sizeofStateHC() }), level }
    }

    /// Compresses a page into `out` and returns the size in bytes; `None` if the result does not
    /// fit.
    pub fn compress(&mut self, page: &[u8; PAGE_BYTES], out: &mut [MaybeUninit<u8>]) -> Option<usize> {
        // SAFETY: the state has the size and alignment (8) that the library requires and is cleared
        // by the call; reads PAGE_BYTES, writes at most out.len() bytes.
        let bytes = unsafe {
            LZ4_compress_HC_extStateHC(
                self.state.as_mut_ptr().cast(),
                page.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                PAGE_BYTES as c_int,
                out.len() as c_int,
                self.level,
            )
        };
        (bytes > 0).then_some(bytes as usize)
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

/// Decompresses a page that [`PageCompressor`](super::lz4_page::PageCompressor) or [`Lz4hc`] compressed; returns false if the result is not a
/// whole page. Needs no working memory.
///
/// Uses the "partial" function with the whole page as the part. The function stops when the page is
/// full instead of checking the last bytes of the object. Near the end of the object, its fast path
/// remains usable. A page of noise and zeroes takes half the time of `LZ4_decompress_safe`, other
/// pages the same.
#[inline]
pub fn decompress(object: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
    let size = PAGE_BYTES as c_int;
    let Ok(len) = c_int::try_from(object.len()) else { return false };
    // SAFETY: reads `len` bytes, writes at most PAGE_BYTES; the function accepts untrusted input.
    let bytes = unsafe {
        LZ4_decompress_safe_partial(object.as_ptr().cast(), page.as_mut_ptr().cast(), len, size, size)
    };
    bytes == size
}
