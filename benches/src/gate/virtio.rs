//! A virtio driver that makes requests available all at once and waits for their answers.
#![expect(unsafe_code)]
// UNSAFETY: the driver says how many of its completions are filled in.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use freestone::PAGE_BYTES;

/// A server that is counted is some fifty times slower than else.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(60);

/// Requests at once: so few wakes that their share does not count.
pub const DEPTH: u64 = 32;

/// A queue, and memory for one page.
pub struct Virtio {
    queue: Blkioq,
    page: MemoryRegion,
    _client: Blkio,
}

impl Virtio {
    pub fn connect(socket: &Path) -> Result<Self> {
        let mut client = Blkio::new("virtio-blk-vhost-user")?;
        client.set_str("path", socket.to_str().context("the socket's path is no text")?)?;
        client.connect()?;
        let queue = client.start()?.queues.pop().context("no queue")?;
        let page = client.alloc_mem_region(PAGE_BYTES)?;
        client.map_mem_region(&page)?;
        Ok(Self { queue, page, _client: client })
    }

    /// Reads or writes so many pages at once, at most [`DEPTH`], of whatever is in the memory.
    pub fn requests(&mut self, write: bool, count: u64) -> Result<()> {
        let none = ReqFlags::empty();
        for number in 0..count {
            let (at, page) = (number * PAGE_BYTES as u64, self.page.addr);
            if write {
                self.queue.write(at, std::ptr::with_exposed_provenance(page), PAGE_BYTES, 0, none);
            } else {
                self.queue.read(at, std::ptr::with_exposed_provenance_mut(page), PAGE_BYTES, 0, none);
            }
        }
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; DEPTH as usize];
        let (all, mut patience) = (count as usize, ANSWER_WAIT_MAX);
        let done = self.queue.do_io(&mut completions[..all], all, Some(&mut patience), None)?;
        ensure!(done == all, "{done} of {all} requests are answered");
        for completion in &completions[..done] {
            // SAFETY: as many are filled in as it says.
            let outcome = unsafe { completion.assume_init_ref() }.ret;
            ensure!(outcome == 0, "a request failed: {outcome}");
        }
        Ok(())
    }
}
