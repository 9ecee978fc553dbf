//! Page compression for RAM disks: algorithms, parameters, and one stream per CPU.
//!
//! A *stream* is the working memory of an algorithm. A thread uses the stream of the CPU it runs
//! on, so memory is bounded by the number of CPUs, not of threads. Disks with the same algorithm
//! and parameters share streams.
//!
//! While a thread holds a stream, it allocates no memory and takes no page fault. (The kernel had
//! to choose between waiting for memory with the stream locked and compressing twice.) The
//! compressed page is written to a buffer on the caller's stack, which was touched before. The
//! thread releases the stream before it stores the compressed page in the pool.

mod codecs;
mod dictionary;
mod group;
mod lend;
mod lz4;
mod lz4_page;
mod lzo;
mod params;
mod zstd;

use std::mem::MaybeUninit;
use std::sync::{Arc, Weak};

pub use self::codecs::{Codecs, PRIORITIES, SetError};
pub use self::dictionary::{DICTIONARY_BYTES_MAX, Dictionary};
pub use self::group::{GROUP_PAGES, GroupCompressor, GroupReader};
use self::lend::Lender;
pub use self::params::{Algorithm, Params, ParamsError};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::sync::Mutex;

/// Uncompressed content of a page.
pub type Page = [u8; PAGE_BYTES];

/// Buffer on the caller's stack for a compressed page. A page whose compressed form does not fit is
/// stored uncompressed.
pub struct Scratch([MaybeUninit<u8>; Scratch::BYTES]);

impl Scratch {
    /// Largest compressed page that is stored compressed, in bytes. In the pool of a RAM disk a
    /// larger object uses as much memory as a whole page.
    pub const BYTES: usize = 3968;

    /// Creates a buffer with uninitialised content.
    #[inline]
    pub fn new() -> Self {
        Self([MaybeUninit::uninit(); Self::BYTES])
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// Working memory of a compression algorithm, for one thread at a time.
enum Stream {
    Lz4(lz4_page::PageCompressor),
    Lz4hc(lz4::Lz4hc),
    Lzo(lzo::Lzo),
    Zstd(zstd::Zstd),
    Store,
}

impl Stream {
    #[inline]
    fn compress(&mut self, page: &Page, out: &mut [MaybeUninit<u8>]) -> Option<usize> {
        match self {
            Self::Lz4(stream) => stream.compress(page, out),
            Self::Lz4hc(stream) => stream.compress(page, out),
            Self::Lzo(stream) => stream.compress(page, out),
            Self::Zstd(stream) => stream.compress(page, out),
            Self::Store => None,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Lz4(stream) => stream.bytes(),
            Self::Lz4hc(stream) => stream.bytes(),
            Self::Lzo(stream) => stream.bytes(),
            Self::Zstd(stream) => stream.bytes(),
            Self::Store => 0,
        }
    }
}

/// The streams of one algorithm, one per CPU.
///
/// Lock order: a thread locks a stream while it holds no other lock, except the page's slot for a
/// read or a partial write. While it holds a stream, it takes no lock, allocates nothing and does
/// not wait.
pub struct Streams {
    algorithm: Algorithm,
    level: i32,
    dictionary: Option<Dictionary>,
    /// Dictionary digested by libzstd, shared by all streams.
    digest: Option<Arc<zstd::Digest>>,
    per_cpu: Lender<Stream>,
}

impl Streams {
    /// Returns the process-wide streams of an algorithm with these parameters; creates them if no
    /// disk uses them.
    ///
    /// # Errors
    /// Fails if the parameters do not fit the algorithm, or memory is short.
    pub fn shared(algorithm: Algorithm, params: &Params) -> std::result::Result<Arc<Self>, StreamsError> {
        static SHARED: Mutex<Vec<Weak<Streams>>> = Mutex::new(Vec::new());
        let level = params.check(algorithm)?;
        let mut shared = SHARED.lock();
        shared.retain(|streams| streams.strong_count() > 0);
        let same =
            |s: &Arc<Self>| s.algorithm == algorithm && s.level == level && s.dictionary == params.dictionary;
        if let Some(streams) = shared.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(streams);
        }
        let streams = Arc::new(Self::new(algorithm, params)?);
        shared.push(Arc::downgrade(&streams));
        Ok(streams)
    }

    /// Creates the streams of all CPUs, and touches all their memory to avoid later page faults.
    ///
    /// # Errors
    /// Fails if the parameters do not fit the algorithm, or memory is short.
    pub fn new(algorithm: Algorithm, params: &Params) -> std::result::Result<Self, StreamsError> {
        let level = params.check(algorithm)?;
        let digest = params.dictionary.as_ref().map(|dictionary| zstd::Digest::new(dictionary, level));
        let digest = digest.transpose().map_err(StreamsError::Device)?;
        let make = || {
            let mut stream = match algorithm {
                Algorithm::Lz4 => Stream::Lz4(lz4_page::PageCompressor::new(level as usize)),
                Algorithm::Lz4hc => Stream::Lz4hc(lz4::Lz4hc::new(level)),
                Algorithm::Lzo => Stream::Lzo(lzo::Lzo::new()),
                Algorithm::Zstd => Stream::Zstd(zstd::Zstd::new(level, digest.clone())?),
                Algorithm::Store => Stream::Store,
            };
            warm_up(&mut stream);
            Ok(Mutex::new(stream))
        };
        let per_cpu = Lender::try_new(make).map_err(StreamsError::Device)?;
        Ok(Self { algorithm, level, dictionary: params.dictionary.clone(), digest, per_cpu })
    }

    /// Compresses `page` into `scratch`; returns `None` if the result exceeds [`Scratch::BYTES`].
    #[inline]
    pub fn compress<'s>(&self, page: &Page, scratch: &'s mut Scratch) -> Option<&'s [u8]> {
        freestone_core::trail::step!();
        touch::scratch(scratch);
        touch::packed(&mut self.per_cpu.lock(), page, scratch)
    }

    /// Decompresses the compressed page `object` into `page`.
    ///
    /// # Errors
    /// [`Error::Media`] if `object` is not a page compressed by this algorithm.
    #[inline]
    pub fn decompress(&self, object: &[u8], page: &mut Page) -> Result<()> {
        let whole = match self.algorithm {
            Algorithm::Lz4 | Algorithm::Lz4hc => lz4::decompress(object, page),
            Algorithm::Lzo => lzo::decompress(object, page),
            Algorithm::Zstd => {
                touch::page(page);
                match &mut *self.per_cpu.lock() {
                    Stream::Zstd(stream) => stream.decompress(object, page),
                    _ => false,
                }
            }
            Algorithm::Store => false,
        };
        if whole { Ok(()) } else { Err(Error::Media) }
    }

    /// Returns the number of pages compressed in about a millisecond; callers limit a piece of work
    /// to this number.
    pub fn pages_per_millisecond(&self) -> u64 {
        match self.algorithm {
            Algorithm::Lz4 | Algorithm::Store => 256,
            Algorithm::Zstd if self.level <= 3 => 64,
            Algorithm::Lz4hc if self.level <= 9 => 32,
            Algorithm::Lzo => 4,
            Algorithm::Zstd | Algorithm::Lz4hc => 8,
        }
    }

    /// Returns the algorithm of the streams.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the compression level; 0 if the algorithm does not have levels.
    pub fn level(&self) -> i32 {
        self.level
    }

    /// Returns the dictionary, or `None` if compression uses none.
    pub fn dictionary(&self) -> Option<&Dictionary> {
        self.dictionary.as_ref()
    }

    /// Returns the memory use in bytes of all streams, the dictionary and its digested form.
    pub fn bytes(&self) -> u64 {
        let streams: usize = self.per_cpu.iter().map(|stream| stream.lock().bytes()).sum();
        let dictionary = self.dictionary.as_ref().map_or(0, |dictionary| dictionary.bytes().len());
        let digest = self.digest.as_ref().map_or(0, |digest| digest.bytes());
        (streams + dictionary + digest) as u64
    }
}

/// Errors from creating streams.
#[derive(Debug, thiserror::Error)]
pub enum StreamsError {
    /// The parameters do not fit the algorithm.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// Memory for the streams or the digested dictionary is short.
    #[error(transparent)]
    Device(Error),
}

/// Compresses pages of several kinds, so that all memory of a stream is touched before its first
/// use.
fn warm_up(stream: &mut Stream) {
    let mut scratch = Scratch::new();
    touch::scratch(&mut scratch);
    let mut noise = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move || {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        noise
    };
    for kind in 0..4 {
        let mut page = [0_u8; PAGE_BYTES];
        for (index, byte) in page.iter_mut().enumerate() {
            *byte = match kind {
                0 => next() as u8,
                // The kinds after noise: many short matches; long matches; text from a small
                // alphabet.
                1 => [1, 2, 3, next() as u8][index % 4],
                2 => (index / 512) as u8,
                _ => b"etaoin sr"[next() as usize % 9],
            };
        }
        let packed = touch::packed(stream, &page, &mut scratch).map(<[u8]>::to_vec);
        if let (Stream::Zstd(stream), Some(object)) = (&mut *stream, packed) {
            stream.decompress(&object, &mut page);
        }
    }
}

mod touch {
    #![expect(unsafe_code)]
    // UNSAFETY: scratch memory stays uninitialised until the compressor has written it.

    use super::{Page, Scratch, Stream};

    /// Writes to every memory page of the buffer now, to avoid page faults while a stream is held.
    #[inline]
    pub fn scratch(scratch: &mut Scratch) {
        let last = Scratch::BYTES - 1;
        for at in [0, last] {
            // SAFETY: inside the array; volatile so that the write happens now. The buffer spans at
            // most two pages.
            unsafe { scratch.0[at].as_mut_ptr().write_volatile(0) };
        }
    }

    /// Writes to the memory of a page about to be filled, to avoid page faults while a stream is
    /// held.
    #[inline]
    pub fn page(page: &mut Page) {
        for at in [0, page.len() - 1] {
            // SAFETY: inside the array; volatile so that the write happens now.
            unsafe { (&raw mut page[at]).write_volatile(0) };
        }
    }

    /// Compresses a page into `scratch` and returns the compressed bytes; `None` if they do not
    /// fit.
    #[inline]
    pub fn packed<'s>(stream: &mut Stream, page: &Page, scratch: &'s mut Scratch) -> Option<&'s [u8]> {
        let bytes = stream.compress(page, &mut scratch.0)?;
        let written = &scratch.0[..bytes];
        // SAFETY: the compressors return the number of bytes they wrote.
        Some(unsafe { std::slice::from_raw_parts(written.as_ptr().cast(), written.len()) })
    }
}

#[cfg(test)]
mod tests;
