//! A submitted request: read what is needed, go on, until its memory is full.

use std::mem;
use std::sync::Arc;

use freestone_core::device::{Completion, IoBuf, Request, Result};
use freestone_core::sync::{LazyLock, thread};
use freestone_core::work_queue::WorkQueue;

use super::chain::Chain;
use super::reader::{Cursor, Need};
use super::table::Table;

/// Most threads; unpacking clusters is their only long work.
const THREADS_MAX: usize = 4;

/// The threads that carry on requests after their disks have answered: a fixed number for all
/// images of the process. They never wait for a disk, so a slow one holds up nobody else's
/// requests.
pub(super) static THREADS: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    WorkQueue::with_threads("qcow2", threads)
});

/// Most bytes that are read apart from the request's own memory.
const MAX_PIECE_BYTES: u64 = 1 << 20;

/// A read that is under way. It is owned by whoever carries it on at the moment: a thread, a disk's
/// request, or the list of those that wait for a cluster. Dropped anywhere, it is answered with
/// "gone".
pub(super) struct Job {
    chain: Arc<Chain>,
    request: Request,
    cursor: Cursor,
    buffer: IoBuf,
    done: Completion,
}

impl Job {
    /// `buffer` has the length of the request, which is a checked read.
    pub fn new(chain: Arc<Chain>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        let cursor = Cursor::new(request.offset, request.len);
        Self { chain, request, cursor, buffer, done }
    }

    /// Goes on until a disk has to be waited for.
    pub fn run(mut self) {
        match self.chain.advance(&mut self.cursor, self.request.offset, &mut self.buffer) {
            Ok(Some(need)) => self.fetch(need),
            Ok(None) => self.answer(Ok(())),
            Err(error) => self.answer(Err(error)),
        }
    }

    fn answer(self, outcome: Result<()>) {
        self.done.complete(outcome, self.buffer);
    }

    fn fetch(mut self, need: Need) {
        match need {
            Need::Slice { layer, slice } => {
                let len = self.chain.layers[layer].table.as_ref().map_or(0, Table::slice_bytes);
                self.read(layer, false, slice.host, len, move |mut job, bytes| {
                    job.chain.take_slice(&mut job.cursor, layer, slice, bytes);
                    job.run();
                });
            }
            Need::Data { layer, host, len } => {
                let source = self.chain.layers[layer].clusters();
                if len == self.request.len && source.is_plain(host, len) {
                    // The usual case: one read, into the request's own memory, answered by the
                    // disk's own thread.
                    let chain = Arc::clone(&self.chain);
                    let buffer = mem::replace(&mut self.buffer, IoBuf::empty());
                    let done = self.done;
                    let of = Arc::clone(&chain);
                    let end = Completion::new(move |outcome, buffer| {
                        let outcome = outcome.map_err(|error| {
                            of.unreadable(
                                layer,
                                of.layers[layer].clusters(),
                                host,
                                super::source::plain(error),
                            )
                        });
                        done.complete(outcome, buffer);
                    });
                    return chain.layers[layer].clusters().start_plain(host, buffer, end);
                }
                let len = len.min(MAX_PIECE_BYTES);
                self.read(layer, true, host, len as usize, move |mut job, bytes| {
                    let from = (job.cursor.at - job.request.offset) as usize;
                    job.buffer[from..from + bytes.len()].copy_from_slice(bytes);
                    job.cursor.pass(len);
                    job.run();
                });
            }
            Need::Cluster { layer, number, host, len } => {
                let Some((job, claim)) = Claim::take(self, layer, number) else { return };
                job.read(layer, false, host, len as usize, move |mut job, packed| {
                    let taken = job.chain.take_cluster(&mut job.cursor, layer, number, packed);
                    // Only now, so that those who waited find it.
                    drop(claim);
                    match taken {
                        Ok(()) => job.run(),
                        Err(error) => job.answer(Err(error)),
                    }
                });
            }
        }
    }

    /// Reads bytes of an image, or of where its clusters lie, and goes on with them on one of
    /// [`THREADS`].
    fn read(
        self,
        layer: usize,
        clusters: bool,
        host: u64,
        len: usize,
        go_on: impl FnOnce(Self, &[u8]) + Send + 'static,
    ) {
        let chain = Arc::clone(&self.chain);
        let this = Arc::clone(&chain);
        let of = &this.layers[layer];
        let source = if clusters { of.clusters() } else { &of.source };
        source.start(host, len, move |blocks| {
            // The thread of the disk only hands on.
            THREADS.push(move || {
                let of = &chain.layers[layer];
                let source = if clusters { of.clusters() } else { &of.source };
                let bytes = blocks.and_then(|blocks| {
                    let mut bytes = IoBuf::zeroed(len)?;
                    source.gather(host, &blocks, &mut bytes);
                    Ok(bytes)
                });
                match bytes {
                    Ok(bytes) => go_on(self, &bytes),
                    Err(error) => {
                        let error = chain.unreadable(layer, source, host, error);
                        self.answer(Err(error));
                    }
                }
            });
        });
    }
}

/// The right to unpack a cluster. Whoever comes meanwhile waits, and goes on when it is dropped:
/// the cluster is kept then, or the next one tries.
struct Claim {
    chain: Arc<Chain>,
    cluster: (usize, u64),
}

impl Claim {
    /// The claim and the job back; or the job waits for another's.
    fn take(job: Job, layer: usize, number: u64) -> Option<(Job, Self)> {
        let chain = Arc::clone(&job.chain);
        let cluster = (layer, number);
        {
            let mut unpacking = chain.unpacking.lock();
            if let Some(waiting) = unpacking.get_mut(&cluster) {
                waiting.push(Box::new(move || job.run()));
                return None;
            }
            unpacking.insert(cluster, Vec::new());
        }
        Some((job, Self { chain, cluster }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let waiting = self.chain.unpacking.lock().remove(&self.cluster);
        for go_on in waiting.unwrap_or_default() {
            THREADS.push(go_on);
        }
    }
}
