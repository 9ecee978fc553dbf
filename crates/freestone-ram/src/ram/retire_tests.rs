//! What is being freed while the cleaner is held up, as those see it who need room.

use std::sync::mpsc::TryRecvError;

use super::super::parts::FamilyParts;
use super::super::tests::{config, content};
use super::super::threads::tests::{disk, limit, put, round, submit};
use super::super::{PAGE, Ram, Writeback, WritebackError};
use super::*;
use freestone_core::device::{Blocking, Completion, Device, Error, IoBuf, Request};

/// Blocks of the backing device.
const BLOCKS: u64 = 64;

/// A family whose backing device is full of a disk's pages, and its memory of another one's.
fn full() -> (Arc<FamilyParts>, Ram, Ram) {
    let (family, on_device) = disk(BLOCKS);
    let in_memory = Ram::make(&family, config(256 * PAGE).disksize, Parent::Nothing, Arc::default()).unwrap();
    let page = |slot| content(5, slot, PAGE as usize);
    (0..BLOCKS).for_each(|slot| put(&on_device, slot, &page(slot)));
    let (written, error) = on_device.writeback(&Writeback::Pages(vec![0..=BLOCKS - 1])).unwrap_err();
    assert_eq!(error, WritebackError::NoSpace);
    // It has nothing in memory.
    on_device.discard(written.pages * PAGE, (BLOCKS - written.pages) * PAGE).unwrap();
    assert_eq!(on_device.mm_stat().compr_data_size, 0);
    family.pages.compact();
    (0..16).for_each(|slot| put(&in_memory, slot, &page(slot)));
    limit(&family);
    (family, on_device, in_memory)
}

/// Holds up the cleaner as long as what is returned lives.
fn hold_up() -> Held {
    let (let_go, wait) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    CLEANER.start().unwrap();
    CLEANER.push(move || {
        tell.send(()).unwrap();
        let _ = wait.recv();
    });
    told.recv().unwrap();
    Held(let_go)
}

struct Held(#[expect(dead_code, reason = "dropped to let go")] std::sync::mpsc::Sender<()>);

/// Does it, while the cleaner is held up.
fn beside(what: impl FnOnce(), meanwhile: impl FnOnce()) {
    let held = hold_up();
    what();
    meanwhile();
    drop(held);
}

#[test]
fn without_anything_to_free_there_is_no_room() {
    let (family, _on_device, in_memory) = full();
    let told = submit(&in_memory, 200);
    round(&family);
    assert_eq!(told.try_recv(), Ok(Err(Error::NoSpace)));
}

/// What is retired while a write waits for memory holds the backing device's blocks: the round
/// frees them.
#[test]
fn blocks_of_what_is_retired_are_room() {
    let (family, on_device, in_memory) = full();
    let told = submit(&in_memory, 200);
    beside(
        || on_device.rewind().unwrap(),
        || {
            assert!(family.pages.is_freeing());
            round(&family);
            assert_eq!(told.try_recv(), Ok(Ok(())));
        },
    );
}

/// A removed device is not retired yet: who finds no room waits for that.
#[test]
fn a_removal_that_has_not_begun_is_waited_for() {
    let (family, on_device, in_memory) = full();
    let told = beside_removal(&family, on_device, &in_memory);
    // It goes on a moment after the removal has ended.
    let mut answer = told.try_recv();
    while answer == Err(TryRecvError::Empty) {
        round(&family);
        answer = told.try_recv();
    }
    assert_eq!(answer, Ok(Ok(())));
}

/// So does writeback by hand.
#[test]
fn writeback_waits_for_blocks_of_a_removal_that_has_not_begun() {
    let (family, on_device, in_memory) = full();
    let pages = Writeback::Pages(vec![0..=15]);
    assert_eq!(in_memory.writeback(&pages).unwrap_err().1, WritebackError::NoSpace);
    std::thread::scope(|scope| {
        let held = hold_up();
        drop(on_device);
        assert!(family.pages.removals.is_pending());
        let writing = scope.spawn(|| in_memory.writeback(&pages));
        // Long enough for it to be refused.
        std::thread::sleep(Duration::from_millis(50));
        assert!(!writing.is_finished(), "{:?}", writing.join());
        drop(held);
        assert_eq!(writing.join().unwrap().unwrap().pages, 16);
    });
}

/// Who has an answer may remove the device at once, and what it leaves must be known then to come
/// back soon: so nothing else may hold the device any more.
#[test]
fn a_request_that_waited_is_answered_when_only_its_user_holds_the_device() {
    let (family, on_device, in_memory) = full();
    let (tell, told) = std::sync::mpsc::channel();
    let holds = Arc::downgrade(&in_memory.0);
    let done = Completion::new(move |outcome, _| tell.send((outcome, holds.strong_count())).unwrap());
    let page = IoBuf::copy_of(&content(5, 200, PAGE as usize)).unwrap();
    in_memory.submit(Request::write(200 * PAGE, PAGE), page, done);
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty), "it waits");
    drop(on_device);
    let mut answer = told.try_recv();
    while answer == Err(TryRecvError::Empty) {
        round(&family);
        answer = told.try_recv();
    }
    assert_eq!(answer, Ok((Ok(()), 1)));
}

/// Asks the other disk for room, and has a round end, while the removal has not begun.
fn beside_removal(
    family: &Arc<FamilyParts>,
    removed: Ram,
    other: &Ram,
) -> std::sync::mpsc::Receiver<freestone_core::device::Result<()>> {
    let mut told = None;
    beside(
        || drop(removed),
        || {
            assert!(family.pages.removals.is_pending());
            let answer = submit(other, 200);
            round(family);
            assert!(answer.try_recv().is_err(), "it was refused");
            told = Some(answer);
        },
    );
    told.unwrap()
}
