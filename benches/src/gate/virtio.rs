//! A virtio driver that sends one request at a time and waits for its answer.
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

    /// Reads or writes a page, of whatever is in the memory.
    pub fn request(&mut self, write: bool, offset: u64) -> Result<()> {
        let none = ReqFlags::empty();
        if write {
            let page = std::ptr::with_exposed_provenance(self.page.addr);
            self.queue.write(offset, page, PAGE_BYTES, 0, none);
        } else {
            let page = std::ptr::with_exposed_provenance_mut(self.page.addr);
            self.queue.read(offset, page, PAGE_BYTES, 0, none);
        }
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }];
        let done = self.queue.do_io(&mut completions, 1, Some(&mut ANSWER_WAIT_MAX.clone()), None)?;
        ensure!(done == 1, "no answer");
        // SAFETY: one is filled in.
        let outcome = unsafe { completions[0].assume_init_ref() }.ret;
        ensure!(outcome == 0, "a request failed: {outcome}");
        Ok(())
    }
}
