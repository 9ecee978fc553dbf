//! vhost-user-blk client without a virtual machine: libblkio's driver, with a thread per queue.
#![expect(unsafe_code)]
// UNSAFETY: the driver says how many of its completions are filled in.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use freestone::PAGE_BYTES;

use super::fio_nbd::Direction;

/// Time limit for completions. A server under callgrind is about fifty times slower.
const COMPLETION_WAIT_MAX: Duration = Duration::from_secs(60);

/// Maximum requests in flight per queue.
pub const DEPTH_MAX: usize = 32;

/// Queues of a disk, and memory for the pages in flight.
pub struct Virtio {
    queues: Vec<Blkioq>,
    memory: MemoryRegion,
    _client: Blkio,
}

#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub direction: Direction,
    /// Requests in flight, at most [`DEPTH_MAX`].
    pub depth: usize,
    /// Completions to wait for before the next requests are submitted: 1, or all in flight.
    pub batch: usize,
}

/// Requests of one queue, to pages from number `first` on. After the last of the disk's `pages`
/// pages, page 0 follows.
struct QueueRun {
    load: Load,
    first: u64,
    pages: u64,
    count: u64,
}

impl Virtio {
    pub fn connect(socket: &Path, queues: usize) -> Result<Self> {
        let mut client = Blkio::new("virtio-blk-vhost-user")?;
        client.set_str("path", socket.to_str().context("the socket's path is not UTF-8")?)?;
        client.connect()?;
        client.set_i32("num-queues", queues.try_into()?)?;
        let queues = client.start()?.queues;
        let memory = client.alloc_mem_region(queues.len() * DEPTH_MAX * PAGE_BYTES)?;
        client.map_mem_region(&memory)?;
        Ok(Self { queues, memory, _client: client })
    }

    /// Runs `count` requests of a page each, divided among the queues, and returns the duration.
    pub fn run(&mut self, load: Load, count: u64, disk_bytes: u64) -> Result<Duration> {
        let share = count / self.queues.len() as u64;
        let pages = disk_bytes / PAGE_BYTES as u64;
        let memory = &self.memory;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(&mut self.queues)
                .map(|(number, queue)| {
                    let queue_run = QueueRun { load, first: number * share, pages, count: share };
                    scope.spawn(move || queue_run.run(queue, number as usize, memory))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        Ok(start.elapsed())
    }
}

impl QueueRun {
    fn run(&self, queue: &mut Blkioq, number: usize, memory: &MemoryRegion) -> Result<()> {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; DEPTH_MAX];
        let slots = self.load.depth.min(DEPTH_MAX);
        let mut free: Vec<usize> = (0..slots).collect();
        let (mut submitted, mut completed) = (0, 0);
        while completed < self.count {
            while submitted < self.count
                && let Some(slot) = free.pop()
            {
                let at = (self.first + submitted) % self.pages * PAGE_BYTES as u64;
                let page = memory.addr + (number * DEPTH_MAX + slot) * PAGE_BYTES;
                let none = ReqFlags::empty();
                if self.load.direction == Direction::Write {
                    queue.write(at, std::ptr::with_exposed_provenance(page), PAGE_BYTES, slot, none);
                } else {
                    queue.read(at, std::ptr::with_exposed_provenance_mut(page), PAGE_BYTES, slot, none);
                }
                submitted += 1;
            }
            let mut timeout = COMPLETION_WAIT_MAX;
            let least = self.load.batch.min(slots - free.len());
            let count = queue.do_io(&mut completions[..slots], least, Some(&mut timeout), None)?;
            ensure!(count >= least, "only {count} of {least} requests completed in time");
            for completion in &completions[..count] {
                // SAFETY: `do_io` has filled in the first `count` completions.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(completion.ret == 0, "a request failed: {}", completion.ret);
                free.push(completion.user_data);
            }
            completed += count as u64;
        }
        Ok(())
    }
}
