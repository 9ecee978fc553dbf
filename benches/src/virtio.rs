//! A client of vhost-user disks without a virtual machine: libblkio's driver, a thread for each queue.
#![expect(unsafe_code)]
// UNSAFETY: the driver says how many of its completions are filled in.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use freestone::PAGE_BYTES;

use crate::fio_nbd::Direction;

/// A server that is counted is some fifty times slower than else.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(60);

/// Most requests in flight at a queue.
pub const DEPTH_MAX: usize = 32;

/// A disk's queues, and memory for as many pages as may be in flight.
pub struct Virtio {
    queues: Vec<Blkioq>,
    memory: MemoryRegion,
    _client: Blkio,
}

/// What each queue is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub direction: Direction,
    /// Requests in flight, at most [`DEPTH_MAX`].
    pub depth: usize,
    /// The next are made when so many are answered: 1, or all of them.
    pub together: usize,
}

/// The requests of one queue, to pages from `first` on, of all the `pages` of the disk.
struct Work {
    load: Load,
    first: u64,
    pages: u64,
    count: u64,
}

impl Virtio {
    pub fn connect(socket: &Path, queues: usize) -> Result<Self> {
        let mut client = Blkio::new("virtio-blk-vhost-user")?;
        client.set_str("path", socket.to_str().context("the socket's path is no text")?)?;
        client.connect()?;
        client.set_i32("num-queues", queues.try_into()?)?;
        let queues = client.start()?.queues;
        let memory = client.alloc_mem_region(queues.len() * DEPTH_MAX * PAGE_BYTES)?;
        client.map_mem_region(&memory)?;
        Ok(Self { queues, memory, _client: client })
    }

    /// Makes `count` requests, shared out among the queues, each of a page; how long they took.
    pub fn run(&mut self, load: Load, count: u64, disk_bytes: u64) -> Result<Duration> {
        let share = count / self.queues.len() as u64;
        let pages = disk_bytes / PAGE_BYTES as u64;
        let memory = &self.memory;
        let began = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(&mut self.queues)
                .map(|(number, queue)| {
                    let work = Work { load, first: number * share, pages, count: share };
                    scope.spawn(move || work.run(queue, number as usize, memory))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        Ok(began.elapsed())
    }
}

impl Work {
    fn run(&self, queue: &mut Blkioq, number: usize, memory: &MemoryRegion) -> Result<()> {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; DEPTH_MAX];
        let slots = self.load.depth.min(DEPTH_MAX);
        let mut free: Vec<usize> = (0..slots).collect();
        let (mut begun, mut done) = (0, 0);
        while done < self.count {
            while begun < self.count
                && let Some(slot) = free.pop()
            {
                let at = (self.first + begun) % self.pages * PAGE_BYTES as u64;
                let page = memory.addr + (number * DEPTH_MAX + slot) * PAGE_BYTES;
                let none = ReqFlags::empty();
                if self.load.direction == Direction::Write {
                    queue.write(at, std::ptr::with_exposed_provenance(page), PAGE_BYTES, slot, none);
                } else {
                    queue.read(at, std::ptr::with_exposed_provenance_mut(page), PAGE_BYTES, slot, none);
                }
                begun += 1;
            }
            let mut patience = ANSWER_WAIT_MAX;
            let least = self.load.together.min(slots - free.len());
            let some = queue.do_io(&mut completions[..slots], least, Some(&mut patience), None)?;
            ensure!(some >= least, "{some} of {least} requests are answered in time");
            for completion in &completions[..some] {
                // SAFETY: as many are filled in as it says.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(completion.ret == 0, "a request failed: {}", completion.ret);
                free.push(completion.user_data);
            }
            done += some as u64;
        }
        Ok(())
    }
}
