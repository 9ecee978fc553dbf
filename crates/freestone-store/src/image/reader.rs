//! Reads that cannot complete inline, split into pieces of the length of a chunk.

use crate::rt::sync::atomic::{AtomicUsize, Ordering};
use crate::rt::sync::{Arc, Mutex, PoisonError};
use crate::rt::time::Instant;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device::{self, Completion, IoBuf, Request};

use super::content::{Content, FetchedPages, Lookup};
use super::fetch::Key;
use super::fetches::{Fetches, Waiter};
use super::queue::Queue;
use super::streams::Streams;
use crate::format::name::Name;
use crate::format::{CHUNK_BYTES, UNIT_PAGES};
use crate::objects::Fault;
use crate::store::Error;

/// Maximum number of reader threads of an image. Reader threads may wait for the local disk.
const READERS: usize = 8;
/// Maximum number of repeated lookups for a piece, as cache files may be closed again before they are read.
const TRIES: usize = 100;
/// Without a cache, a read that needs at least this number of units of a chunk fetches the whole chunk.
const UNITS_MAX: usize = 3;

/// An image with the threads that serve its reads.
pub struct Reader {
    pub content: Arc<Content>,
    fetches: Fetches<Content, Piece>,
    streams: Streams,
    readers: Queue<Piece>,
}

/// State of a read request that could not complete inline.
struct PendingRead {
    reader: Arc<Reader>,
    offset: u64,
    deadline: Instant,
    /// Buffer of the request. Each piece locks the buffer to copy its data.
    buffer: Mutex<IoBuf>,
    failed: Mutex<Option<device::Error>>,
    /// Number of pieces that are not complete. The last piece completes the request.
    left: AtomicUsize,
    done: Mutex<Option<Completion>>,
}

/// A part of a read request, inside one range of the length of a chunk.
struct Piece {
    pending: Arc<PendingRead>,
    offset: u64,
    len: usize,
    /// Pages that were fetched from the object store for this piece.
    got: Vec<FetchedPages>,
}

thread_local! {
    static PAGES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Reader {
    pub fn new(content: Arc<Content>) -> Arc<Self> {
        let fetches = Fetches::new(Arc::clone(&content));
        Arc::new(Self {
            content,
            fetches,
            streams: Streams::default(),
            readers: Queue::new("image-read", READERS, Piece::run),
        })
    }

    /// Prefetches the chunks of a byte range of the image, if there is a cache.
    pub fn prefetch(&self, offset: u64, len: u64) {
        self.prefetch_except(offset, len, None);
    }

    /// Prefetches the chunks in the trace of the image, if there is a cache.
    pub fn follow_trace(&self) {
        if self.content.cache().is_some() {
            self.fetches.prefetch([Key::Trace]);
        }
    }

    /// Prefetches chunks after a cache miss for the chunk `name`. These are the chunks of the rest of the
    /// piece, and the next chunks of a sequential read.
    fn prefetch_after_miss(&self, name: Name, offset: u64, len: u64) {
        let end = self.streams.record_miss(offset);
        self.prefetch_except(offset, (end - offset).max(len), Some(name));
    }

    /// Prefetches the chunks of a byte range of the image except for the chunk `but`, if there is a cache.
    fn prefetch_except(&self, offset: u64, len: u64, but: Option<Name>) {
        if self.content.cache().is_some() {
            let names = self.content.chunks(offset, len).into_iter();
            self.fetches.prefetch(names.filter(|name| Some(*name) != but).map(Key::Chunk));
        }
    }

    /// Closes the image, and fails all waiting requests.
    pub fn close(&self) {
        self.content.close();
        self.fetches.close();
    }

    /// Starts a validated read request: splits it into pieces and queues them for the reader threads.
    pub fn begin(self: &Arc<Self>, request: &Request, buffer: IoBuf, done: Completion) {
        let chunk = CHUNK_BYTES as u64;
        let (start, end) = (request.offset, request.offset + request.len);
        let pieces = (start / chunk..end.div_ceil(chunk)).map(|number| {
            let (first, last) = (start.max(number * chunk), end.min((number + 1) * chunk));
            (first, (last - first) as usize)
        });
        let pieces: Vec<(u64, usize)> = pieces.collect();
        let pending = Arc::new(PendingRead {
            reader: Arc::clone(self),
            offset: start,
            deadline: Instant::now() + 2 * self.content.config.timeout,
            buffer: Mutex::new(buffer),
            failed: Mutex::new(None),
            left: AtomicUsize::new(pieces.len()),
            done: Mutex::new(Some(done)),
        });
        for (offset, len) in pieces {
            Piece { pending: Arc::clone(&pending), offset, len, got: Vec::new() }.enqueue();
        }
    }
}

impl PendingRead {
    fn end_piece(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let failed = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = IoBuf::empty();
        let buffer =
            std::mem::replace(&mut *self.buffer.lock().unwrap_or_else(PoisonError::into_inner), nothing);
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            // A completion that panics must not end the reader thread.
            let _ = catch_unwind(AssertUnwindSafe(|| done.complete(failed.map_or(Ok(()), Err), buffer)));
        }
    }
}

impl Waiter<Option<FetchedPages>> for Piece {
    fn deliver(mut self, got: Option<FetchedPages>) {
        self.got.extend(got);
        self.enqueue();
    }

    fn deliver_error(self, error: device::Error) {
        self.fail(error);
    }
}

impl Piece {
    /// Queues the piece for a reader thread. Fails the piece if the queue cannot spawn a thread.
    fn enqueue(self) {
        let pending = Arc::clone(&self.pending);
        if let Err(piece) = pending.reader.readers.push(self) {
            piece.fail(device::Error::NoMemory);
        }
    }

    /// Ends the piece with an error. The request then fails with the first error of its pieces.
    fn fail(self, error: device::Error) {
        self.pending.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.pending.end_piece();
    }

    /// Reads the available pages of the piece. At the first missing page, queues a fetch, after which the
    /// piece runs again.
    fn run(mut self) {
        let pending = Arc::clone(&self.pending);
        let Reader { content, fetches, .. } = &*pending.reader;
        let mut tries = 0;
        while self.len > 0 {
            if content.is_closed() {
                return self.fail(device::Error::Gone);
            }
            let found = PAGES.with_borrow_mut(|pages| {
                pages.resize(CHUNK_BYTES, 0);
                let pages = &mut pages[..self.len];
                let found = content.find(self.offset, pages, &self.got, true);
                if let Lookup::Read(bytes) = found {
                    let at = (self.offset - pending.offset) as usize;
                    let mut buffer = pending.buffer.lock().unwrap_or_else(PoisonError::into_inner);
                    buffer[at..at + bytes].copy_from_slice(&pages[..bytes]);
                }
                found
            });
            let key = match found {
                Lookup::Read(bytes) => {
                    self.offset += bytes as u64;
                    self.len -= bytes;
                    continue;
                }
                Lookup::Retry => {
                    tries += 1;
                    if tries > TRIES {
                        let error = Error::Local("a file of the cache does not stay open".into());
                        return self.fail(content.record_failure(&error));
                    }
                    continue;
                }
                Lookup::Segment(number) => Key::Segment(number),
                Lookup::Chunk { name, first, count } => {
                    content.touch(name);
                    let (unit, last) = (first / UNIT_PAGES, (first + count - 1) / UNIT_PAGES);
                    if content.cache().is_some() || last - unit + 1 >= UNITS_MAX {
                        pending.reader.prefetch_after_miss(name, self.offset, self.len as u64);
                        Key::Chunk(name)
                    } else {
                        Key::Unit(name, unit)
                    }
                }
            };
            if Instant::now() >= pending.deadline {
                return self.fail(content.record_failure(&Error::of("an image", Fault::TimedOut)));
            }
            return fetches.demand(key, self);
        }
        pending.end_piece();
    }
}
