//! A submitted read of an image, which fetches metadata and clusters until its buffer is full.

use std::mem;
use std::sync::Arc;

use freestone_core::device::{Completion, IoBuf, Request, Result};
use freestone_core::sync::{LazyLock, thread};
use freestone_core::work_queue::WorkQueue;

use super::chain::Chain;
use super::reader::{Cursor, Fetch};
use super::table::Table;

/// Maximum number of threads. Decompression is their only long work, so more threads are not
/// needed.
const THREADS_MAX: usize = 4;

/// Threads that continue requests after disk reads: a fixed number for all images of the process.
/// These threads never wait for a disk, so a slow disk does not delay other requests.
pub(super) static THREADS: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    WorkQueue::with_threads("qcow2", threads)
});

/// Maximum number of bytes that one read fetches into a separate buffer.
const MAX_PIECE_BYTES: u64 = 1 << 20;

/// A read in progress. A job is owned by what continues it: a thread, a disk read, or the list of
/// requests that wait for a cluster. A dropped job completes its request with `Gone`.
pub(super) struct Job {
    chain: Arc<Chain>,
    request: Request,
    cursor: Cursor,
    buffer: IoBuf,
    done: Completion,
}

impl Job {
    /// Creates a job. `request` must be a read whose range was checked, and `buffer` must have the
    /// length of the request.
    pub fn new(chain: Arc<Chain>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        let cursor = Cursor::new(request.offset, request.len);
        Self { chain, request, cursor, buffer, done }
    }

    /// Continues the request until a disk read is needed or the request completes.
    pub fn run(mut self) {
        match self.chain.advance(&mut self.cursor, self.request.offset, &mut self.buffer) {
            Ok(Some(need)) => self.fetch(need),
            Ok(None) => self.complete(Ok(())),
            Err(error) => self.complete(Err(error)),
        }
    }

    fn complete(self, outcome: Result<()>) {
        self.done.complete(outcome, self.buffer);
    }

    fn fetch(mut self, need: Fetch) {
        match need {
            Fetch::Slice { layer, slice } => {
                let len = self.chain.layers[layer].table.as_ref().map_or(0, Table::slice_bytes);
                self.read(layer, false, slice.host, len, move |mut job, bytes| {
                    job.chain.store_slice(&mut job.cursor, layer, slice, bytes);
                    job.run();
                });
            }
            Fetch::Data { layer, host, len } => {
                let source = self.chain.layers[layer].clusters();
                if len == self.request.len && source.is_aligned(host, len) {
                    // The common case is one read into the request's own buffer, which completes on
                    // the thread of the disk.
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
                                super::source::device_error(error),
                            )
                        });
                        done.complete(outcome, buffer);
                    });
                    return chain.layers[layer].clusters().start_aligned(host, buffer, end);
                }
                let len = len.min(MAX_PIECE_BYTES);
                self.read(layer, true, host, len as usize, move |mut job, bytes| {
                    let from = (job.cursor.at - job.request.offset) as usize;
                    job.buffer[from..from + bytes.len()].copy_from_slice(bytes);
                    job.cursor.pass(len);
                    job.run();
                });
            }
            Fetch::Cluster { layer, number, host, len } => {
                let Some((job, claim)) = Claim::take(self, layer, number) else { return };
                job.read(layer, false, host, len as usize, move |mut job, packed| {
                    let taken = job.chain.store_cluster(&mut job.cursor, layer, number, packed);
                    // Drop the claim only now, so that waiting requests find the cluster in the
                    // cache.
                    drop(claim);
                    match taken {
                        Ok(()) => job.run(),
                        Err(error) => job.complete(Err(error)),
                    }
                });
            }
        }
    }

    /// Reads bytes of an image file, or of its data file if `clusters` is true. Then calls `resume`
    /// with the bytes on one of [`THREADS`].
    fn read(
        self,
        layer: usize,
        clusters: bool,
        host: u64,
        len: usize,
        resume: impl FnOnce(Self, &[u8]) + Send + 'static,
    ) {
        let chain = Arc::clone(&self.chain);
        let this = Arc::clone(&chain);
        let of = &this.layers[layer];
        let source = if clusters { of.clusters() } else { &of.source };
        source.start(host, len, move |blocks| {
            // The thread of the disk must not block, so it only queues the work.
            THREADS.push(move || {
                let of = &chain.layers[layer];
                let source = if clusters { of.clusters() } else { &of.source };
                let bytes = blocks.and_then(|blocks| {
                    let mut bytes = IoBuf::zeroed(len)?;
                    source.gather(host, &blocks, &mut bytes);
                    Ok(bytes)
                });
                match bytes {
                    Ok(bytes) => resume(self, &bytes),
                    Err(error) => {
                        let error = chain.unreadable(layer, source, host, error);
                        self.complete(Err(error));
                    }
                }
            });
        });
    }
}

/// The exclusive right to decompress a cluster. Other requests for the cluster wait until the claim
/// is dropped. Then the other requests find the cluster in the cache, or one of them claims the
/// cluster.
struct Claim {
    chain: Arc<Chain>,
    cluster: (usize, u64),
}

impl Claim {
    /// Returns the claim and the job; `None` if another job has the claim, so that this one must
    /// wait.
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
        for resume in waiting.unwrap_or_default() {
            THREADS.push(resume);
        }
    }
}
