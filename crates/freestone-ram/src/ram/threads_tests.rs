//! Rounds without the threads: what becomes of requests that wait for memory, step by step.

use super::super::tests::{config, content, ram};
use super::super::{PAGE, Ram, Writeback, WritebackError};
use super::*;
use crate::ram::Config;
use crate::ram::family::Family;
use crate::ram::parent::Parent;
use freestone_core::device::{Blocking, Buffer, Completion, Device, Error, IoBuf, Request, Tried};

/// A disk for which no thread works, over a backing device of so many blocks.
pub(in crate::ram) fn disk(blocks: u64) -> (Arc<FamilyParts>, Ram) {
    let backing: Arc<dyn Device> = Arc::new(ram(blocks * PAGE));
    let parts = FamilyParts::new(Config::default().backed_by(backing, true)).unwrap();
    let ram = Ram::make(&parts, config(256 * PAGE).disksize, Parent::Nothing, Arc::default()).unwrap();
    (parts, ram)
}

/// Has the pool's memory be all that there may be.
pub(in crate::ram) fn limit(family: &Arc<FamilyParts>) {
    Family(Arc::clone(family)).set_mem_limit(family.pages.pool.pages() * PAGE);
}

pub(in crate::ram) fn put(ram: &Ram, slot: u64, page: &[u8]) {
    let tried = ram.try_io(&Request::write(slot * PAGE, PAGE), Buffer::Write(page));
    assert_eq!(tried, Ok(Tried::Done), "{slot}");
}

/// Submits a page that does not shrink. Returns where its answer comes out.
pub(in crate::ram) fn submit(ram: &Ram, slot: u64) -> std::sync::mpsc::Receiver<Result<(), Error>> {
    let (tell, told) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, _| tell.send(outcome).unwrap());
    let page = IoBuf::copy_of(&content(5, slot, PAGE as usize)).unwrap();
    ram.submit(Request::write(slot * PAGE, PAGE), page, done);
    told
}

/// One round, and what it hands to the work queue.
pub(in crate::ram) fn round(family: &Arc<FamilyParts>) {
    let keeper = &family.pages.keeper;
    let waiting = keeper.is_awaited(|_| true);
    family.evict.make_room(waiting);
    keeper.run_queued();
}

#[test]
fn what_only_moves_on_the_device_frees_no_memory() {
    let (family, ram) = disk(64);
    let half = |slot| content(4, slot, PAGE as usize);
    (0..160).for_each(|slot| put(&ram, slot, &half(slot)));
    let (written, error) = ram.writeback(&Writeback::Pages(vec![0..=159])).unwrap_err();
    assert!(error == WritebackError::NoSpace && written.pages > 100, "{written:?} {error:?}");
    // Two blocks are half empty then. What they hold is moved, which makes room on the device for
    // nothing.
    for slot in [20, 60] {
        ram.discard(slot * PAGE, PAGE).unwrap();
    }
    family.pages.compact();
    limit(&family);
    let told = submit(&ram, 200);
    let writes = family.pages.store.as_ref().unwrap().numbers().writes;
    round(&family);
    assert!(family.pages.store.as_ref().unwrap().numbers().writes > writes, "nothing was moved");
    assert_eq!(told.try_recv(), Ok(Err(Error::NoSpace)));
}

#[test]
fn a_pool_that_cannot_be_packed_frees_no_memory() {
    let (family, ram) = disk(64);
    // An object of each of some classes, in a page of its own.
    for slot in 0..16 {
        let mut page = content(5, slot, PAGE as usize);
        page[128 * (slot as usize + 1)..].fill(0);
        put(&ram, slot, &page);
    }
    ram.set_writeback_limit(0);
    ram.set_writeback_limit_enable(true);
    limit(&family);
    let told = submit(&ram, 200);
    round(&family);
    assert_eq!(told.try_recv(), Ok(Err(Error::NoSpace)));
}

#[test]
fn what_leaves_memory_lets_requests_go_on() {
    let (family, ram) = disk(64);
    (0..16).for_each(|slot| put(&ram, slot, &content(5, slot, PAGE as usize)));
    limit(&family);
    let told = submit(&ram, 200);
    assert!(told.try_recv().is_err());
    round(&family);
    assert_eq!(told.try_recv(), Ok(Ok(())));
    let mut back = vec![0; PAGE as usize];
    ram.try_io(&Request::read(200 * PAGE, PAGE), Buffer::Read(&mut back)).unwrap();
    assert!(back == content(5, 200, PAGE as usize));
}
