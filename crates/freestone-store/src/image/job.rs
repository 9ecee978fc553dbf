//! A request that could not be answered at once, in pieces of a chunk's length.

use crate::rt::sync::atomic::{AtomicUsize, Ordering};
use crate::rt::sync::{Arc, Mutex, PoisonError};
use crate::rt::time::Instant;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device::{self, Completion, IoBuf, Request};

use super::fetch::Key;
use super::fetches::{Fetches, Waiter};
use super::find::{Content, Found, Got};
use super::queue::Queue;
use super::streams::Streams;
use crate::format::name::Name;
use crate::format::{CHUNK_BYTES, UNIT_PAGES};
use crate::objects::Fault;
use crate::store::Error;

/// Threads that wait for the local disk.
const READERS: usize = 8;
/// How often a file that is closed again and again while it is read is tried.
const TRIES: usize = 100;
/// Units of a chunk from which on all of it is fetched where there is no cache.
const UNITS_MAX: usize = 3;

/// An image, and the threads that work for those who read it.
pub struct Reader {
    pub content: Arc<Content>,
    fetches: Fetches<Content, Piece>,
    streams: Streams,
    readers: Queue<Piece>,
}

/// A request.
struct Job {
    reader: Arc<Reader>,
    offset: u64,
    deadline: Instant,
    /// Locked to copy into it.
    buffer: Mutex<IoBuf>,
    failed: Mutex<Option<device::Error>>,
    /// Pieces that are not done.
    left: AtomicUsize,
    done: Mutex<Option<Completion>>,
}

/// A part of a request.
struct Piece {
    job: Arc<Job>,
    offset: u64,
    len: usize,
    /// What came from the store for it.
    got: Vec<Got>,
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

    /// Fetches what lies in a range, if there is time, and a cache.
    pub fn ahead(&self, offset: u64, len: u64) {
        self.ahead_but(offset, len, None);
    }

    /// Fetches what was read first at another time.
    pub fn follow_trace(&self) {
        if self.content.cache().is_some() {
            self.fetches.ahead([Key::Trace]);
        }
    }

    /// Somebody is about to wait for a chunk: fetches the rest of the piece as well, which may lie in several
    /// chunks, and what comes behind it.
    fn missed(&self, name: Name, offset: u64, len: u64) {
        let end = self.streams.missed(offset);
        self.ahead_but(offset, (end - offset).max(len), Some(name));
    }

    /// Fetches chunks, if there is time, and a cache; but for one.
    fn ahead_but(&self, offset: u64, len: u64, but: Option<Name>) {
        if self.content.cache().is_some() {
            let names = self.content.chunks(offset, len).into_iter();
            self.fetches.ahead(names.filter(|name| Some(*name) != but).map(Key::Chunk));
        }
    }

    /// Answers all who wait.
    pub fn close(&self) {
        self.content.close();
        self.fetches.close();
    }

    /// Begins a read that was checked.
    pub fn begin(self: &Arc<Self>, request: &Request, buffer: IoBuf, done: Completion) {
        let chunk = CHUNK_BYTES as u64;
        let (start, end) = (request.offset, request.offset + request.len);
        let pieces = (start / chunk..end.div_ceil(chunk)).map(|number| {
            let (first, last) = (start.max(number * chunk), end.min((number + 1) * chunk));
            (first, (last - first) as usize)
        });
        let pieces: Vec<(u64, usize)> = pieces.collect();
        let job = Arc::new(Job {
            reader: Arc::clone(self),
            offset: start,
            deadline: Instant::now() + 2 * self.content.config.timeout,
            buffer: Mutex::new(buffer),
            failed: Mutex::new(None),
            left: AtomicUsize::new(pieces.len()),
            done: Mutex::new(Some(done)),
        });
        for (offset, len) in pieces {
            Piece { job: Arc::clone(&job), offset, len, got: Vec::new() }.go_on();
        }
    }
}

impl Job {
    fn ended(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let failed = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = IoBuf::empty();
        let buffer =
            std::mem::replace(&mut *self.buffer.lock().unwrap_or_else(PoisonError::into_inner), nothing);
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            // A completion that panics ends its request, not the thread.
            let _ = catch_unwind(AssertUnwindSafe(|| done.complete(failed.map_or(Ok(()), Err), buffer)));
        }
    }
}

impl Waiter<Option<Got>> for Piece {
    fn came(mut self, got: Option<Got>) {
        self.got.extend(got);
        self.go_on();
    }

    fn failed(self, error: device::Error) {
        self.fail(error);
    }
}

impl Piece {
    /// Has a reader go on with it.
    fn go_on(self) {
        let job = Arc::clone(&self.job);
        if let Err(piece) = job.reader.readers.push(self) {
            piece.fail(device::Error::NoMemory);
        }
    }

    /// Ends it with an error.
    fn fail(self, error: device::Error) {
        self.job.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.job.ended();
    }

    /// Reads what is at hand, and asks for what is not.
    fn run(mut self) {
        let job = Arc::clone(&self.job);
        let Reader { content, fetches, .. } = &*job.reader;
        let mut tries = 0;
        while self.len > 0 {
            if content.is_closed() {
                return self.fail(device::Error::Gone);
            }
            let found = PAGES.with_borrow_mut(|pages| {
                pages.resize(CHUNK_BYTES, 0);
                let pages = &mut pages[..self.len];
                let found = content.find(self.offset, pages, &self.got, true);
                if let Found::Read(bytes) = found {
                    let at = (self.offset - job.offset) as usize;
                    let mut buffer = job.buffer.lock().unwrap_or_else(PoisonError::into_inner);
                    buffer[at..at + bytes].copy_from_slice(&pages[..bytes]);
                }
                found
            });
            let key = match found {
                Found::Read(bytes) => {
                    self.offset += bytes as u64;
                    self.len -= bytes;
                    continue;
                }
                Found::Later => {
                    tries += 1;
                    if tries > TRIES {
                        let error = Error::Local("a file of the cache does not stay open".into());
                        return self.fail(content.failed(&error));
                    }
                    continue;
                }
                Found::Segment(number) => Key::Segment(number),
                Found::Chunk { name, first, count } => {
                    content.touch(name);
                    let (unit, last) = (first / UNIT_PAGES, (first + count - 1) / UNIT_PAGES);
                    if content.cache().is_some() || last - unit + 1 >= UNITS_MAX {
                        job.reader.missed(name, self.offset, self.len as u64);
                        Key::Chunk(name)
                    } else {
                        Key::Unit(name, unit)
                    }
                }
            };
            if Instant::now() >= job.deadline {
                return self.fail(content.failed(&Error::of("an image", Fault::Late)));
            }
            return fetches.want(key, self);
        }
        job.ended();
    }
}
