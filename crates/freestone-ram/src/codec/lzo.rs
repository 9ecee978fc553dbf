//! LZO1X, by a library that is neither the kernel's nor GPL's. Its search for matches is more
//! thorough than that of the kernel's `lzo1x_1`: objects are smaller, and take longer to make. Any
//! LZO1X decompressor reads them.

use std::mem::MaybeUninit;

use freestone_core::PAGE_BYTES;
use lzokay::compress::{Dict, compress_no_alloc};
use lzokay::decompress;
use zerocopy::IntoBytes as _;

use super::Scratch;

/// Working memory of one compressor.
pub struct Lzo {
    /// The tables of the search.
    tables: Box<Dict>,
    /// The library takes no memory that is not initialised.
    packed: Box<[u8; Scratch::BYTES]>,
}

impl Lzo {
    pub fn new() -> Self {
        let mut tables = Dict::new();
        // Written once, so that no fault is taken on it later.
        tables.as_mut_bytes().fill(0);
        Self { tables, packed: Box::new([0; Scratch::BYTES]) }
    }

    /// Compresses a page into `out`; `None` where it does not fit.
    pub fn compress(&mut self, page: &[u8; PAGE_BYTES], out: &mut [MaybeUninit<u8>]) -> Option<usize> {
        let room = out.len().min(Scratch::BYTES);
        let bytes = compress_no_alloc(page, &mut self.packed[..room], &mut self.tables).ok()?;
        for (to, from) in out.iter_mut().zip(&self.packed[..bytes]) {
            to.write(*from);
        }
        Some(bytes)
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.tables) + size_of_val(&*self.packed)
    }
}

/// Decompresses an object; false where it is not a whole page. Needs no working memory.
pub fn decompress(object: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
    decompress::decompress(object, page) == Ok(PAGE_BYTES)
}
