//! Reads that cannot complete inline, split into pieces of the length of a chunk.

use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicUsize, Ordering};
use crate::rt::time::Instant;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device::{self, Completion, IoBuf, Request};
use freestone_core::sync::Mutex;

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
            readers: Queue::new("image-read", READERS, Piece::run_on_reader),
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

    /// Starts a validated read request: splits it into pieces. A piece whose maps are not in memory waits for these, and
    /// the others go to the reader threads.
    pub fn begin(self: &Arc<Self>, request: &Request, buffer: IoBuf, done: Completion) {
        freestone_core::trail::step!();
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
            let piece = Piece { pending: Arc::clone(&pending), offset, len, got: Vec::new() };
            match self.content.missing_segment(offset) {
                Some(number) => self.fetches.demand(Key::Segment(number), piece),
                None => piece.enqueue(),
            }
        }
    }
}

impl PendingRead {
    fn end_piece(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let failed = *self.failed.lock();
        let buffer = std::mem::replace(&mut *self.buffer.lock(), IoBuf::empty());
        let done = self.done.lock().take();
        if let Some(done) = done {
            // A completion that panics must not end the reader thread.
            let _ = catch_unwind(AssertUnwindSafe(|| done.complete(failed.map_or(Ok(()), Err), buffer)));
        }
    }
}

impl Waiter<Content> for Piece {
    fn deliver(mut self, got: Option<FetchedPages>) {
        self.got.extend(got);
        self.enqueue();
    }

    fn resume(mut self, got: Option<FetchedPages>) -> Option<(Key, Self)> {
        self.got.extend(got);
        self.run()
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
        self.pending.failed.lock().get_or_insert(error);
        self.pending.end_piece();
    }

    fn run_on_reader(self) {
        let pending = Arc::clone(&self.pending);
        if let Some((key, piece)) = self.run() {
            pending.reader.fetches.demand(key, piece);
        }
    }

    /// Reads the available pages of the piece. Returns the piece, with the key of the first missing object, if it must
    /// run again when this object is fetched.
    fn run(mut self) -> Option<(Key, Self)> {
        match self.read_available() {
            Ok(Some(key)) => return Some((key, self)),
            Ok(None) => self.pending.end_piece(),
            Err(error) => self.fail(error),
        }
        None
    }

    fn read_available(&mut self) -> device::Result<Option<Key>> {
        freestone_core::trail::step!();
        let pending = Arc::clone(&self.pending);
        let content = &pending.reader.content;
        let mut tries = 0;
        while self.len > 0 {
            if content.is_closed() {
                return Err(device::Error::Gone);
            }
            let found = PAGES.with_borrow_mut(|pages| {
                if pages.len() < self.len {
                    pages.resize(self.len, 0);
                }
                let pages = &mut pages[..self.len];
                let found = content.find(self.offset, pages, &self.got, true);
                if let Lookup::Read(bytes) = found {
                    let at = (self.offset - pending.offset) as usize;
                    let mut buffer = pending.buffer.lock();
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
                        return Err(content.record_failure(&error));
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
                return Err(content.record_failure(&Error::of("an image", Fault::TimedOut)));
            }
            return Ok(Some(key));
        }
        Ok(None)
    }
}
