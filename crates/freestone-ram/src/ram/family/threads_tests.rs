//! Tests of requests that wait for memory, with eviction rounds run step by step on the test's
//! thread.

use super::*;
use crate::ram::Config;
use crate::ram::Family;
use crate::ram::device::parent::Parent;
use crate::ram::geometry::PAGE;
use crate::ram::tests::{config, content, ram};
use crate::ram::{Ram, Writeback, WritebackError};
use freestone_core::device::{Blocking, Buffer, Completion, Device, Error, IoBuf, Request, TryResult};

/// Creates a family without threads, with a backing device of `blocks` blocks, and a disk in the
/// family.
pub(in crate::ram) fn disk(blocks: u64) -> (Arc<FamilyParts>, Ram) {
    let backing: Arc<dyn Device> = Arc::new(ram(blocks * PAGE));
    let parts = FamilyParts::new(Config::default().backed_by(backing, true)).unwrap();
    let ram = Ram::make(&parts, config(256 * PAGE).disksize, Parent::Nothing, Arc::default()).unwrap();
    (parts, ram)
}

/// Sets the memory limit of the pool to its current size.
pub(in crate::ram) fn limit(family: &Arc<FamilyParts>) {
    Family(Arc::clone(family)).set_mem_limit(family.pages.pool.pages() * PAGE);
}

pub(in crate::ram) fn put(ram: &Ram, slot: u64, page: &[u8]) {
    let tried = ram.try_io(&Request::write(slot * PAGE, PAGE), Buffer::Write(page));
    assert_eq!(tried, Ok(TryResult::Done), "{slot}");
}

/// Submits a write of an incompressible page. Returns the receiver of its result.
pub(in crate::ram) fn submit(ram: &Ram, slot: u64) -> std::sync::mpsc::Receiver<Result<(), Error>> {
    let (sender, result) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap());
    let page = IoBuf::copy_of(&content(5, slot, PAGE as usize)).unwrap();
    ram.submit(Request::write(slot * PAGE, PAGE), page, done);
    result
}

/// Runs one eviction round, and the tasks that it queues on the work queue.
pub(in crate::ram) fn round(family: &Arc<FamilyParts>) {
    let keeper = &family.pages.keeper;
    let waiting = keeper.has_waiting(|_| true);
    family.evict.evict_as_needed(waiting);
    keeper.run_queued();
}

#[test]
fn reclaim_frees_no_memory_for_waiting_write() {
    let (family, ram) = disk(64);
    let half = |slot| content(4, slot, PAGE as usize);
    (0..160).for_each(|slot| put(&ram, slot, &half(slot)));
    let (written, error) = ram.writeback(&Writeback::Pages(vec![0..=159])).unwrap_err();
    assert!(error == WritebackError::NoSpace && written.pages > 100, "{written:?} {error:?}");
    // Leave two blocks half empty. Reclaim moves their objects, which frees space on the device but
    // no memory.
    for slot in [20, 60] {
        ram.discard(slot * PAGE, PAGE).unwrap();
    }
    family.pages.compact();
    limit(&family);
    let result = submit(&ram, 200);
    let writes = family.pages.store.as_ref().unwrap().stat().writes;
    round(&family);
    assert!(family.pages.store.as_ref().unwrap().stat().writes > writes, "nothing was moved");
    assert_eq!(result.try_recv(), Ok(Err(Error::NoSpace)));
}

#[test]
fn uncompactable_pool_frees_no_memory() {
    let (family, ram) = disk(64);
    // Store objects of different size classes, each in a pool page of its own, so that compaction
    // frees nothing.
    for slot in 0..16 {
        let mut page = content(5, slot, PAGE as usize);
        page[128 * (slot as usize + 1)..].fill(0);
        put(&ram, slot, &page);
    }
    ram.set_writeback_limit(0);
    ram.set_writeback_limit_enable(true);
    limit(&family);
    let result = submit(&ram, 200);
    round(&family);
    assert_eq!(result.try_recv(), Ok(Err(Error::NoSpace)));
}

#[test]
fn eviction_resumes_waiting_write() {
    let (family, ram) = disk(64);
    (0..16).for_each(|slot| put(&ram, slot, &content(5, slot, PAGE as usize)));
    limit(&family);
    let result = submit(&ram, 200);
    assert!(result.try_recv().is_err());
    round(&family);
    assert_eq!(result.try_recv(), Ok(Ok(())));
    let mut back = vec![0; PAGE as usize];
    ram.try_io(&Request::read(200 * PAGE, PAGE), Buffer::Read(&mut back)).unwrap();
    assert!(back == content(5, 200, PAGE as usize));
}
