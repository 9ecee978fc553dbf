//! Tests of freeing retired layers (old content of rewound or removed devices) while the cleaner
//! thread is blocked.

use std::sync::mpsc::TryRecvError;

use super::*;
use crate::ram::device::parts::FamilyParts;
use crate::ram::family::threads::tests::{disk, limit, put, round, submit};
use crate::ram::geometry::PAGE;
use crate::ram::tests::{config, content};
use crate::ram::{Ram, Writeback, WritebackError};
use freestone_core::device::{Blocking, Completion, Device, Error, IoBuf, Request};

const BLOCKS: u64 = 64;

/// Creates a family with two disks: pages of the first fill the backing device, and pages of the
/// second fill the memory. Returns the family and both disks.
fn full() -> (Arc<FamilyParts>, Ram, Ram) {
    let (family, on_device) = disk(BLOCKS);
    let in_memory = Ram::make(&family, config(256 * PAGE).disksize, Parent::Nothing, Arc::default()).unwrap();
    let page = |slot| content(5, slot, PAGE as usize);
    (0..BLOCKS).for_each(|slot| put(&on_device, slot, &page(slot)));
    let (written, error) = on_device.writeback(&Writeback::Pages(vec![0..=BLOCKS - 1])).unwrap_err();
    assert_eq!(error, WritebackError::NoSpace);
    // Discard the pages of the first disk that are still in memory.
    on_device.discard(written.pages * PAGE, (BLOCKS - written.pages) * PAGE).unwrap();
    assert_eq!(on_device.mm_stat().compr_data_size, 0);
    family.pages.compact();
    (0..16).for_each(|slot| put(&in_memory, slot, &page(slot)));
    limit(&family);
    (family, on_device, in_memory)
}

/// Blocks the cleaner thread until the returned value is dropped.
fn block_cleaner() -> CleanerBlock {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let (sender, result) = std::sync::mpsc::channel();
    CLEANER.start().unwrap();
    CLEANER.push(move || {
        sender.send(()).unwrap();
        let _ = wait.recv();
    });
    result.recv().unwrap();
    CleanerBlock(release)
}

struct CleanerBlock(
    #[expect(dead_code, reason = "dropped to unblock the cleaner")] std::sync::mpsc::Sender<()>,
);

/// Runs `work` and then `meanwhile` with the cleaner thread blocked.
fn with_cleaner_blocked(work: impl FnOnce(), meanwhile: impl FnOnce()) {
    let held = block_cleaner();
    work();
    meanwhile();
    drop(held);
}

#[test]
fn write_with_nothing_to_free_fails() {
    let (family, _on_device, in_memory) = full();
    let result = submit(&in_memory, 200);
    round(&family);
    assert_eq!(result.try_recv(), Ok(Err(Error::NoSpace)));
}

/// A rewind retires the layer that fills the backing device while a write waits for memory. The
/// next eviction round frees the layer's blocks.
#[test]
fn round_frees_blocks_of_retired_layer() {
    let (family, on_device, in_memory) = full();
    let result = submit(&in_memory, 200);
    with_cleaner_blocked(
        || on_device.rewind().unwrap(),
        || {
            assert!(family.pages.is_freeing());
            round(&family);
            assert_eq!(result.try_recv(), Ok(Ok(())));
        },
    );
}

/// A write that finds no space waits until the layer of a removed device is retired.
#[test]
fn write_waits_for_pending_removal() {
    let (family, on_device, in_memory) = full();
    let result = beside_removal(&family, on_device, &in_memory);
    // The write completes shortly after the removal ends.
    let mut answer = result.try_recv();
    while answer == Err(TryRecvError::Empty) {
        round(&family);
        answer = result.try_recv();
    }
    assert_eq!(answer, Ok(Ok(())));
}

/// A manual writeback that finds no blocks waits for a pending removal.
#[test]
fn writeback_waits_for_pending_removal() {
    let (family, on_device, in_memory) = full();
    let pages = Writeback::Pages(vec![0..=15]);
    assert_eq!(in_memory.writeback(&pages).unwrap_err().1, WritebackError::NoSpace);
    std::thread::scope(|scope| {
        let held = block_cleaner();
        drop(on_device);
        assert!(family.pages.removals.is_pending());
        let writing = scope.spawn(|| in_memory.writeback(&pages));
        // Wait long enough for the writeback to fail, if it did not wait.
        std::thread::sleep(Duration::from_millis(50));
        assert!(!writing.is_finished(), "{:?}", writing.join());
        drop(held);
        assert_eq!(writing.join().unwrap().unwrap().pages, 16);
    });
}

/// On completion the client may remove the device, and the removal must then count as pending. So a
/// completed request must not hold a reference to the device.
#[test]
fn request_completes_after_dropping_its_device() {
    let (family, on_device, in_memory) = full();
    let (sender, result) = std::sync::mpsc::channel();
    let holds = Arc::downgrade(&in_memory.0);
    let done = Completion::new(move |outcome, _| sender.send((outcome, holds.strong_count())).unwrap());
    let page = IoBuf::copy_of(&content(5, 200, PAGE as usize)).unwrap();
    in_memory.submit(Request::write(200 * PAGE, PAGE), page, done);
    assert_eq!(result.try_recv(), Err(TryRecvError::Empty), "it waits");
    drop(on_device);
    let mut answer = result.try_recv();
    while answer == Err(TryRecvError::Empty) {
        round(&family);
        answer = result.try_recv();
    }
    assert_eq!(answer, Ok((Ok(()), 1)));
}

/// Drops `removed` with the cleaner blocked, submits a write to `other`, and runs an eviction
/// round. Returns the receiver of the write's result.
fn beside_removal(
    family: &Arc<FamilyParts>,
    removed: Ram,
    other: &Ram,
) -> std::sync::mpsc::Receiver<freestone_core::device::Result<()>> {
    let mut result = None;
    with_cleaner_blocked(
        || drop(removed),
        || {
            assert!(family.pages.removals.is_pending());
            let answer = submit(other, 200);
            round(family);
            assert!(answer.try_recv().is_err(), "it was refused");
            result = Some(answer);
        },
    );
    result.unwrap()
}
