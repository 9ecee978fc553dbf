//! Tests of compaction, reset and removal with concurrent requests.

use std::sync::Arc;

use super::{MIB, config, content, ram};
use crate::effort::effort;
use crate::ram::device::parent::Parent;
use crate::ram::device::parts::FamilyParts;
use crate::ram::geometry::PAGE;
use crate::ram::*;
use freestone_core::device::{Blocking, Buffer, Completion, Device, Flags, IoBuf, Request, TryResult};
use freestone_core::{PAGE_BYTES, pin};

#[test]
fn compact_under_traffic_keeps_content() {
    // The disk must have the only reference to the family, as the test takes its parts at the end.
    let family = FamilyParts::new(config(64 * MIB)).unwrap();
    let mut ram = Ram::make(&family, 64 * MIB, Parent::Nothing, Arc::default()).unwrap();
    drop(family);
    let pages = 64 * MIB / PAGE;
    for page in 0..pages {
        ram.write_at(page * PAGE, &content((page % 3) as u8 + 3, page, PAGE_BYTES), Flags::empty()).unwrap();
    }
    // Free every other page of the upper half, so that its spans in the pool are half empty.
    for page in (pages / 2..pages).step_by(2) {
        ram.discard(page * PAGE, PAGE).unwrap();
    }
    let before = ram.mm_stat();
    std::thread::scope(|scope| {
        let traffic: Vec<_> = (0..2)
            .map(|thread| {
                let ram = &ram;
                scope.spawn(move || {
                    let mut page_data = vec![0; PAGE_BYTES];
                    for round in 0..effort(1, 6_u64) {
                        // Rewrite the lower half of the disk, and read the upper half.
                        for page in (0..pages / 2).filter(|p| p % 2 == thread) {
                            let data = content((page + round) as u8 % 3 + 3, page + round, PAGE_BYTES);
                            ram.write_at(page * PAGE, &data, Flags::empty()).unwrap();
                            ram.read_at(page * PAGE, &mut page_data).unwrap();
                            assert!(page_data == data);
                            let other = (pages / 2 + page) | 1;
                            ram.read_at(other * PAGE, &mut page_data).unwrap();
                            assert!(
                                page_data == content((other % 3) as u8 + 3, other, PAGE_BYTES),
                                "page {other}"
                            );
                        }
                    }
                })
            })
            .collect();
        while traffic.iter().any(|t| !t.is_finished()) {
            ram.compact();
        }
    });
    ram.compact();
    let after = ram.mm_stat();
    assert!(after.pages_compacted > 0);
    assert!(after.mem_used_total < before.mem_used_total, "{before:?} {after:?}");
    // After a full compaction only the rounding of sizes is wasted: at most 6 %.
    assert!(after.mem_used_total as f64 <= after.compr_data_size as f64 * 1.06, "{after:?}");
    for page in (pages / 2..pages).filter(|p| p % 2 == 1) {
        let mut back = vec![0; PAGE_BYTES];
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == content((page % 3) as u8 + 3, page, PAGE_BYTES), "page {page}");
    }
    // Rebuild the state of the pool from the slot tables.
    assert!(ram.0.chain.get().abandon(&ram.0.pages).0.is_some());
    let layer = ram.0.layer();
    let words: Vec<_> = (0..pages)
        .filter_map(|slot| Some((layer.owner(slot), layer.table().leaf(slot)?.peek(slot))))
        .collect();
    let inner = Arc::get_mut(&mut ram.0).unwrap();
    // The family parts have a second reference to the pages: replace them.
    inner.family = FamilyParts::new(config(64 * MIB)).unwrap();
    let pool = &mut Arc::get_mut(&mut inner.pages).unwrap().pool;
    let pages_before = pool.pages();
    pool.rebuild(words.iter().copied()).unwrap();
    assert!(pool.pages() <= pages_before);
    for page in 0..pages {
        ram.write_at(page * PAGE, &content(4, page, PAGE_BYTES), Flags::empty()).unwrap();
    }
    for page in 0..pages {
        let mut back = vec![0; PAGE_BYTES];
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == content(4, page, PAGE_BYTES), "page {page} after the rebuild");
    }
}

#[test]
fn reset_under_traffic_leaks_nothing() {
    let ram = ram(8 * MIB);
    std::thread::scope(|scope| {
        let traffic: Vec<_> = (0..3_u64)
            .map(|thread| {
                let ram = &ram;
                scope.spawn(move || {
                    let mut back = vec![0; PAGE_BYTES];
                    for round in 0..3000_u64 {
                        let page = thread * 512 + round % 512;
                        let data = content(round as u8, round, PAGE_BYTES);
                        ram.write_at(page * PAGE, &data, Flags::empty()).unwrap();
                        ram.read_at(page * PAGE, &mut back).unwrap();
                        assert!(back == data || back == [0; PAGE_BYTES]);
                    }
                })
            })
            .collect();
        while traffic.iter().any(|t| !t.is_finished()) {
            ram.reset().unwrap();
            ram.compact();
        }
    });
    ram.reset().unwrap();
    assert_eq!((ram.mm_stat().orig_data_size, ram.mm_stat().compr_data_size), (0, 0));
    assert_eq!(
        (
            ram.mm_stat().mem_used_total,
            ram.memory_overhead().leaves_bytes,
            ram.memory_overhead().backrefs_bytes
        ),
        (0, 0, 0)
    );
}

#[test]
fn try_io_does_not_wait_for_removed_device() {
    let ram = Ram::new(Config { mem_limit: MIB, ..config(16 * MIB) }).unwrap();
    let write = |page: u64, round: u64| {
        ram.write_at(page * PAGE, &content(5, page << 8 | round, PAGE_BYTES), Flags::empty())
    };
    for page in 0..120 {
        write(page, 0).unwrap();
    }
    let snapshot = ram.snapshot().unwrap();
    for page in 0..120 {
        write(page, 1).unwrap();
    }
    let (sender, result) = std::sync::mpsc::channel();
    let full = {
        // The pin keeps the cleaner from processing the removed snapshot.
        let leave = std::sync::Arc::new(std::sync::Barrier::new(2));
        let (entered, is_pinned) = std::sync::mpsc::channel();
        let pinned = {
            let leave = std::sync::Arc::clone(&leave);
            std::thread::spawn(move || {
                pin::pinned(|_| {
                    entered.send(()).unwrap();
                    leave.wait();
                });
            })
        };
        is_pinned.recv().unwrap();
        drop(snapshot);
        let mut page = 200;
        let full = loop {
            let data = content(5, page << 8, PAGE_BYTES);
            let request = Request::write(page * PAGE, PAGE);
            match ram.try_io(&request, Buffer::Write(&data)) {
                Ok(TryResult::Done) => page += 1,
                tried => break (tried, request, data),
            }
        };
        assert_eq!(full.0, Ok(TryResult::WouldBlock), "a removed device is about to give memory back");
        let sender = sender.clone();
        let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap());
        ram.submit(full.1, IoBuf::copy_of(&full.2).unwrap(), done);
        assert!(result.try_recv().is_err(), "it was answered before there is memory");
        leave.wait();
        pinned.join().unwrap();
        full
    };
    assert_eq!(result.recv().unwrap(), Ok(()));
    let mut back = vec![0; PAGE_BYTES];
    ram.read_at(full.1.offset, &mut back).unwrap();
    assert!(back == full.2);
}

/// The last page is emptied as a whole only if the device still ends there under the slot's lock. A
/// write beyond the old end may have happened meanwhile.
#[test]
fn free_end_rechecks_size_under_lock() {
    let config = ForkConfig { size: Some(PAGE + 1536), ..ForkConfig::default() };
    let fork = ram(PAGE).snapshot().unwrap().fork(&config).unwrap();
    fork.write_at(PAGE, &[1; 1536], Flags::empty()).unwrap();
    let free_last_page = |is_end: bool| {
        let freed = pin::pinned(|pin| {
            let view = fork.0.view.load(pin);
            fork.0.pages.free_last_page(view, 1, false, || is_end)
        });
        freed.ok().expect("it need not wait").unwrap()
    };
    let first = || {
        let mut block = [9; 512];
        fork.read_at(PAGE, &mut block).unwrap();
        block[0]
    };
    assert_eq!((free_last_page(false), first()), (None, 1));
    assert_eq!((free_last_page(true), first()), (Some(true), 0));
    assert_eq!((free_last_page(true), first()), (Some(false), 0));
}
