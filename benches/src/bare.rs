//! Reference for the codec benchmarks: the bare codec over a contiguous store of the same objects,
//! without locks, pool or accounting.

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

/// Location and kind of a page's object.
#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Same-filled page: `at` holds the pattern.
    Same,
    Huge,
    Compressed(u16),
}

/// Number of pages by kind.
#[derive(Debug, Default, Clone, Copy)]
pub struct Census {
    pub same: u64,
    pub huge: u64,
    pub compressed: u64,
    /// Bytes of all objects.
    pub bytes: u64,
}

/// The bare codec. A type parameter selects the code, so no loop pays for a dynamic choice.
pub trait Codec {
    /// Compresses into `scratch` and returns the object's size, or None if the page is
    /// incompressible.
    fn compress(&mut self, page: &Page, scratch: &mut Scratch) -> Option<usize>;
    /// Decompresses an object. Returns false unless it yields a whole page.
    fn decompress(&self, object: &[u8], page: &mut Page) -> bool;
}

/// The codec as the library calls it.
pub struct Ours(pub Streams);

impl Ours {
    pub fn new() -> Result<Self> {
        Ok(Self(Streams::new(Algorithm::Lz4, &Params::default())?))
    }
}

impl Codec for Ours {
    #[inline]
    fn compress(&mut self, page: &Page, scratch: &mut Scratch) -> Option<usize> {
        self.0.compress(page, scratch).map(<[u8]>::len)
    }
    #[inline]
    fn decompress(&self, object: &[u8], page: &mut Page) -> bool {
        self.0.decompress(object, page).is_ok()
    }
}

/// liblz4's plain functions, to check that the library's codec is not a slow reference.
pub struct Plain {
    out: Box<Page>,
}

impl Plain {
    pub fn new() -> Self {
        Self { out: Box::new([0; PAGE_BYTES]) }
    }
}

impl Codec for Plain {
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
    /// Compresses all of `pages`.
    pub fn build(pages: &[u8]) -> Result<(Self, Census)> {
        let codec = Ours::new()?;
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

    /// Reads a page into `into`.
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

    /// Does the codec's work for a page write: finds a pattern, compresses, or copies the whole
    /// page.
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

    /// Like [`write`](Self::write), and also copies the object over the old object of `slot`, cut
    /// to its size. Every store has to do at least this.
    #[inline]
    pub fn write_to_place(&mut self, codec: &mut Ours, slot: u32, page: &Page) {
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

    /// Fails if a page does not read back unchanged.
    pub fn verify(&self, codec: &impl Codec, pages: &[u8]) -> Result<()> {
        let mut back = [0; PAGE_BYTES];
        for (number, page) in whole_pages(pages).enumerate() {
            self.read(codec, number as u32, &mut back);
            ensure!(back == *page, "the bare codec changed page {number}");
        }
        Ok(())
    }
}

/// Returns the 64-bit pattern that the page repeats, if any.
pub fn same_filled(page: &Page) -> Option<u64> {
    let (first, _) = page.split_first_chunk::<8>()?;
    (page[..PAGE_BYTES - 8] == page[8..]).then_some(u64::from_ne_bytes(*first))
}

/// Returns the version of the linked liblz4.
pub fn lz4_version() -> String {
    let number = plain::version();
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

/// Fails if liblz4's plain functions cannot compress and decompress the first pages.
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
