//! Compression: algorithms, their parameters, and one stream a CPU.
//!
//! A *stream* is the working memory of an algorithm. There is one for each CPU, taken by the CPU
//! that a thread runs on, so memory is bounded by CPUs and not by threads; disks with the same
//! algorithm and parameters share them. The kernel's history shows the hard point: whoever
//! allocates while it holds a stream either waits for memory with the stream in hand, or compresses
//! twice. Here nothing is allocated under a stream and no page fault is taken: the object is
//! written to the caller's stack, which was touched before, the stream goes back, and only then the
//! pool is asked for a place.

mod codecs;
mod dictionary;
mod lend;
mod lz4;
mod lzo;
mod params;
mod zstd;

use std::mem::MaybeUninit;
use std::sync::{Arc, Weak};

pub use self::codecs::{Codecs, PRIORITIES, SetError};
pub use self::dictionary::{DICTIONARY_BYTES_MAX, Dictionary};
use self::lend::Lender;
pub use self::params::{Algorithm, Params, ParamsError};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::sync::Mutex;

/// A page's content.
pub type Page = [u8; PAGE_BYTES];

/// Room for a compressed page on the caller's stack. A page that needs more is not worth
/// compressing.
pub struct Scratch([MaybeUninit<u8>; Scratch::BYTES]);

impl Scratch {
    /// The largest object that is stored compressed.
    pub const BYTES: usize = crate::pool::class::HUGE_LINE_BYTES;

    /// Uninitialised room.
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

/// One algorithm's working memory for one thread at a time.
enum Stream {
    Lz4(lz4::Lz4),
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

/// The streams of one algorithm, one a CPU.
///
/// Lock order: a stream is taken with nothing held but, for a read or a partial write, the page's
/// slot. Under a stream nothing is taken, allocated or waited for.
pub struct Streams {
    algorithm: Algorithm,
    level: i32,
    dictionary: Option<Dictionary>,
    /// The dictionary as all streams use it.
    digest: Option<Arc<zstd::Digest>>,
    per_cpu: Lender<Stream>,
}

impl Streams {
    /// The process's streams of an algorithm with these parameters: all disks that use them the
    /// same way share them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
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

    /// Makes every CPU's stream and brings all its memory in.
    ///
    /// # Errors
    /// The parameters do not fit the algorithm; no memory.
    pub fn new(algorithm: Algorithm, params: &Params) -> std::result::Result<Self, StreamsError> {
        let level = params.check(algorithm)?;
        let digest = params.dictionary.as_ref().map(|dictionary| zstd::Digest::new(dictionary, level));
        let digest = digest.transpose().map_err(StreamsError::Device)?;
        let make = || {
            let mut stream = match algorithm {
                Algorithm::Lz4 => Stream::Lz4(lz4::Lz4::new(level)),
                Algorithm::Lz4hc => Stream::Lz4hc(lz4::Lz4hc::new(level)),
                Algorithm::Lzo => Stream::Lzo(lzo::Lzo::new()),
                Algorithm::Zstd => Stream::Zstd(zstd::Zstd::new(level, digest.clone())?),
                Algorithm::Store => Stream::Store,
            };
            warm_up(&mut stream);
            Ok(stream)
        };
        let per_cpu = Lender::new(make).map_err(StreamsError::Device)?;
        Ok(Self { algorithm, level, dictionary: params.dictionary.clone(), digest, per_cpu })
    }

    /// Compresses `page` into `scratch`; `None` where the result is over the class-waste line.
    #[inline]
    pub fn compress<'s>(&self, page: &Page, scratch: &'s mut Scratch) -> Option<&'s [u8]> {
        touch::scratch(scratch);
        touch::packed(&mut self.per_cpu.take(), page, scratch)
    }

    /// Decompresses `object` into `page`.
    ///
    /// # Errors
    /// [`Error::Media`]: the object is not what this algorithm made of a page.
    #[inline]
    pub fn decompress(&self, object: &[u8], page: &mut Page) -> Result<()> {
        let whole = match self.algorithm {
            Algorithm::Lz4 | Algorithm::Lz4hc => lz4::decompress(object, page),
            Algorithm::Lzo => lzo::decompress(object, page),
            Algorithm::Zstd => {
                touch::page(page);
                match &mut *self.per_cpu.take() {
                    Stream::Zstd(stream) => stream.decompress(object, page),
                    _ => false,
                }
            }
            Algorithm::Store => false,
        };
        if whole { Ok(()) } else { Err(Error::Media) }
    }

    /// Pages that are compressed in about a millisecond: what a bounded piece of work may be.
    pub fn pages_per_millisecond(&self) -> u64 {
        match self.algorithm {
            Algorithm::Lz4 | Algorithm::Store => 256,
            Algorithm::Zstd if self.level <= 3 => 64,
            Algorithm::Lz4hc if self.level <= 9 => 32,
            Algorithm::Lzo => 4,
            Algorithm::Zstd | Algorithm::Lz4hc => 8,
        }
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The level; 0 where the algorithm has none.
    pub fn level(&self) -> i32 {
        self.level
    }

    /// The dictionary, if there is one.
    pub fn dictionary(&self) -> Option<&Dictionary> {
        self.dictionary.as_ref()
    }

    /// Bytes of all streams, and of the dictionary in all its forms.
    pub fn bytes(&self) -> u64 {
        let streams: usize = self.per_cpu.all().map(|stream| stream.lock().bytes()).sum();
        let dictionary = self.dictionary.as_ref().map_or(0, |dictionary| dictionary.bytes().len());
        let digest = self.digest.as_ref().map_or(0, |digest| digest.bytes());
        (streams + dictionary + digest) as u64
    }
}

/// Why streams could not be made.
#[derive(Debug, thiserror::Error)]
pub enum StreamsError {
    /// Parameters.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// Memory.
    #[error(transparent)]
    Device(Error),
}

/// Compresses pages of every kind once, so that all of a stream's memory has been touched before
/// its first use.
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
                // Many short matches; long matches; text of few letters.
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

    /// Writes to every page of the scratch memory, so that no fault is taken on it later.
    #[inline]
    pub fn scratch(scratch: &mut Scratch) {
        let last = Scratch::BYTES - 1;
        for at in [0, last] {
            // SAFETY: inside the array; volatile so that the write is made now. It spans at most
            // two pages.
            unsafe { scratch.0[at].as_mut_ptr().write_volatile(0) };
        }
    }

    /// Writes to a page that is about to be filled, so that no fault is taken on it under a stream.
    #[inline]
    pub fn page(page: &mut Page) {
        for at in [0, page.len() - 1] {
            // SAFETY: inside the array; volatile so that the write is made now.
            unsafe { (&raw mut page[at]).write_volatile(0) };
        }
    }

    /// What a stream makes of a page.
    #[inline]
    pub fn packed<'s>(stream: &mut Stream, page: &Page, scratch: &'s mut Scratch) -> Option<&'s [u8]> {
        let bytes = stream.compress(page, &mut scratch.0)?;
        let written = &scratch.0[..bytes];
        // SAFETY: the compressors return how many bytes they have written.
        Some(unsafe { std::slice::from_raw_parts(written.as_ptr().cast(), written.len()) })
    }
}

#[cfg(test)]
mod tests;
