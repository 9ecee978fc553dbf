//! Reference for the codec benchmarks: the bare codec over a contiguous store of the same
//! compressed pages, without slot locks, pool or accounting.

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Page, Params, Scratch, Streams};

use crate::data::whole_pages;

/// Compressed pages of a data set, stored one after the other.
#[derive(Clone)]
pub struct Store {
    entries: Vec<Entry>,
    objects: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Same-filled page: `at` holds the repeated 64-bit pattern instead of an offset in `objects`.
    Same,
    Huge,
    Compressed(u16),
}

/// Number of pages by kind, and their stored size.
#[derive(Debug, Default, Clone, Copy)]
pub struct Census {
    pub same: u64,
    pub huge: u64,
    pub compressed: u64,
    /// Size in bytes of all stored pages: compressed ones, and incompressible ones as a whole.
    pub bytes: u64,
}

/// A page codec. Measured loops take the codec as a type parameter, so they pay for no dynamic
/// dispatch.
pub trait Codec {
    /// Compresses `page` into `scratch`. Returns the compressed size in bytes, or None if the page
    /// is incompressible.
    fn compress(&mut self, page: &Page, scratch: &mut Scratch) -> Option<usize>;
    /// Decompresses `object` into `page`. Returns false unless `object` yields a whole page.
    fn decompress(&self, object: &[u8], page: &mut Page) -> bool;
}

/// Freestone's codec, called in the same way as by a RAM disk.
pub struct LibraryCodec(pub Streams);

impl LibraryCodec {
    pub fn new() -> Result<Self> {
        Ok(Self(Streams::new(Algorithm::Lz4, &Params::default())?))
    }
}

impl Codec for LibraryCodec {
    #[inline]
    fn compress(&mut self, page: &Page, scratch: &mut Scratch) -> Option<usize> {
        self.0.compress(page, scratch).map(<[u8]>::len)
    }
    #[inline]
    fn decompress(&self, object: &[u8], page: &mut Page) -> bool {
        self.0.decompress(object, page).is_ok()
    }
}

/// Codec with liblz4's plain functions, to check that Freestone's codec is not a slow reference.
pub struct Liblz4Codec {
    out: Box<Page>,
}

impl Liblz4Codec {
    pub fn new() -> Self {
        Self { out: Box::new([0; PAGE_BYTES]) }
    }
}

impl Codec for Liblz4Codec {
    #[inline]
    fn compress(&mut self, page: &Page, _: &mut Scratch) -> Option<usize> {
        plain::compress(page, &mut self.out[..Scratch::BYTES])
    }
    #[inline]
    fn decompress(&self, object: &[u8], page: &mut Page) -> bool {
        plain::decompress(object, page)
    }
}

impl Store {
    /// Compresses all pages of `pages`. Returns the store and the number of pages by kind.
    pub fn build(pages: &[u8]) -> Result<(Self, Census)> {
        let codec = LibraryCodec::new()?;
        let mut store = Self { entries: Vec::new(), objects: Vec::with_capacity(pages.len()) };
        let mut census = Census::default();
        for page in whole_pages(pages) {
            let entry = if let Some(pattern) = same_filled(page) {
                census.same += 1;
                Entry { at: pattern, kind: Kind::Same }
            } else {
                let at = store.objects.len() as u64;
                let mut scratch = Scratch::new();
                if let Some(object) = codec.0.compress(page, &mut scratch) {
                    census.compressed += 1;
                    store.objects.extend_from_slice(object);
                    Entry { at, kind: Kind::Compressed(object.len() as u16) }
                } else {
                    census.huge += 1;
                    store.objects.extend_from_slice(page);
                    Entry { at, kind: Kind::Huge }
                }
            };
            store.entries.push(entry);
        }
        census.bytes = store.objects.len() as u64;
        Ok((store, census))
    }

    /// Reads page number `page` of the store into `into`.
    #[inline]
    pub fn read(&self, codec: &impl Codec, page: u32, into: &mut Page) {
        let Entry { at, kind } = self.entries[page as usize];
        let from = at as usize;
        match kind {
            Kind::Same => into.as_chunks_mut().0.fill(at.to_ne_bytes()),
            Kind::Huge => into.copy_from_slice(&self.objects[from..from + PAGE_BYTES]),
            Kind::Compressed(len) => {
                assert!(codec.decompress(&self.objects[from..from + usize::from(len)], into));
            }
        }
    }

    /// Does the codec's part of writing a page of the same kind as page `number` of the store:
    /// finds the repeated pattern, compresses, or copies the whole incompressible page.
    #[inline]
    pub fn write(
        &self,
        codec: &mut impl Codec,
        number: u32,
        page: &Page,
        scratch: &mut Scratch,
        copy: &mut Page,
    ) -> usize {
        match self.entries[number as usize].kind {
            Kind::Same => same_filled(page).map_or(0, |pattern| pattern as usize),
            _ => codec.compress(page, scratch).unwrap_or_else(|| {
                copy.copy_from_slice(page);
                PAGE_BYTES
            }),
        }
    }

    /// Like [`write`](Self::write), and also copies the new compressed page over the old one of
    /// `slot`, truncated to the old size. Every real store does at least this work.
    #[inline]
    pub fn write_to_place(&mut self, codec: &mut LibraryCodec, slot: u32, page: &Page) {
        let Entry { at, kind } = self.entries[slot as usize];
        let room = match kind {
            Kind::Same => return,
            Kind::Huge => PAGE_BYTES,
            Kind::Compressed(len) => usize::from(len),
        };
        let mut scratch = Scratch::new();
        let object = codec.0.compress(page, &mut scratch).unwrap_or(page);
        let len = object.len().min(room);
        self.objects[at as usize..][..len].copy_from_slice(&object[..len]);
    }

    /// Returns an error if a page of the store differs from the same page of `pages`.
    pub fn verify(&self, codec: &impl Codec, pages: &[u8]) -> Result<()> {
        let mut back = [0; PAGE_BYTES];
        for (number, page) in whole_pages(pages).enumerate() {
            self.read(codec, number as u32, &mut back);
            ensure!(back == *page, "the bare codec changed page {number}");
        }
        Ok(())
    }
}

/// Returns the 64-bit pattern that the page repeats, or None if the page is not same-filled.
pub fn same_filled(page: &Page) -> Option<u64> {
    let (first, _) = page.split_first_chunk::<8>()?;
    (page[..PAGE_BYTES - 8] == page[8..]).then_some(u64::from_ne_bytes(*first))
}

pub fn lz4_version() -> String {
    let number = plain::version();
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

/// Returns an error if liblz4's plain functions do not compress and decompress the first 1000 pages
/// unchanged.
pub fn check_plain(pages: &[u8]) -> Result<()> {
    let mut back = [0; PAGE_BYTES];
    let mut out = [0; PAGE_BYTES];
    for page in whole_pages(pages).take(1000) {
        if let Some(bytes) = plain::compress(page, &mut out) {
            let object = out.get(..bytes).context("liblz4 wrote too much")?;
            ensure!(plain::decompress(object, &mut back) && back == *page, "liblz4 changed a page");
        }
    }
    Ok(())
}

mod plain {
    #![expect(unsafe_code)]
    // UNSAFETY: calls into a C library.

    use freestone::PAGE_BYTES;
    use freestone::codec::Page;

    pub fn compress(page: &Page, out: &mut [u8]) -> Option<usize> {
        // SAFETY: reads PAGE_BYTES, writes at most out.len() bytes.
        let bytes = unsafe {
            lz4_sys::LZ4_compress_default(
                page.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                PAGE_BYTES as i32,
                out.len() as i32,
            )
        };
        (bytes > 0).then_some(bytes as usize)
    }

    pub fn decompress(object: &[u8], page: &mut Page) -> bool {
        // SAFETY: reads object.len() bytes, writes at most PAGE_BYTES.
        let bytes = unsafe {
            lz4_sys::LZ4_decompress_safe(
                object.as_ptr().cast(),
                page.as_mut_ptr().cast(),
                object.len() as i32,
                PAGE_BYTES as i32,
            )
        };
        bytes == PAGE_BYTES as i32
    }

    pub fn version() -> i32 {
        // SAFETY: returns a constant.
        unsafe { lz4_sys::LZ4_versionNumber() }
    }
}
