//! LZO1X compression with lzokay, a library independent of the kernel's GPL code. The match search
//! of lzokay is more thorough than the kernel's `lzo1x_1`: compressed pages are smaller and take
//! longer to compress. Any LZO1X decompressor can read them.
//!
//! lzokay clears 160 KiB of tables for each page, so this LZO is much slower than lz4. The
//! experiments in `research/` need it.

use std::mem::MaybeUninit;

use freestone_core::PAGE_BYTES;
use lzokay::compress::{Dict, compress_no_alloc};
use lzokay::decompress;
use zerocopy::IntoBytes as _;

use super::Scratch;

pub struct Lzo {
    tables: Box<Dict>,
    /// Output buffer, needed because lzokay only writes to initialised memory.
    packed: Box<[u8; Scratch::BYTES]>,
}

impl Lzo {
    pub fn new() -> Self {
        let mut tables = Dict::new();
        // Write to the tables once now, to avoid page faults during compression.
        tables.as_mut_bytes().fill(0);
        Self { tables, packed: Box::new([0; Scratch::BYTES]) }
    }

    /// Compresses a page into `out` and returns the size in bytes; `None` if the result does not
    /// fit.
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

/// Decompresses a page that [`Lzo`] compressed; returns false if the result is not a whole page.
/// Needs no working memory.
pub fn decompress(object: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
    decompress::decompress(object, page) == Ok(PAGE_BYTES)
}
