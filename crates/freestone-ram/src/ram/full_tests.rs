//! Writes that find no room, where they wait for some.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::tests::{MIB, config, content, ram};
use super::threads::tests::submit;
use super::*;
use freestone_core::device::{Blocking, Buffer, Device, Error, Flags, Request, Tried};

/// What is not there by then does not come.
const PATIENCE: Duration = Duration::from_secs(30);
/// So long nothing may happen.
const LITTLE: Duration = Duration::from_millis(50);

type Told = Receiver<Result<(), Error>>;

/// Writes wait, for so long.
fn waiting(seconds: u64) -> WhenFull {
    WhenFull { wait: true, timeout: Duration::from_secs(seconds), ..WhenFull::default() }
}

/// What a page compresses to nothing of.
fn page(slot: u64) -> Vec<u8> {
    content(5, slot, PAGE_BYTES)
}

/// Writes pages from `first` on until there is no room. Returns how many those were.
fn fill(ram: &Ram, first: u64) -> u64 {
    let full = |slot: &u64| {
        let tried = ram.try_io(&Request::write(slot * PAGE, PAGE), Buffer::Write(&page(*slot)));
        assert!(matches!(tried, Ok(Tried::Done | Tried::WouldBlock)), "{tried:?}: it may wait");
        tried == Ok(Tried::WouldBlock)
    };
    (first..first + 1000).find(full).unwrap() - first
}

/// A disk that is full after so many pages. Its family has no clock: what is not told of room waits
/// for ever.
fn full_disk(when_full: WhenFull) -> (Ram, u64) {
    let parts = FamilyParts::new(Config { when_full, ..Config::default() }).unwrap();
    threads::prepare(&parts);
    let family = Family(parts);
    family.set_mem_limit(MIB);
    let ram = family.ram(4 * MIB).unwrap();
    let pages = fill(&ram, 0);
    assert!((200..=256).contains(&pages), "{pages}");
    (ram, pages)
}

#[track_caller]
fn waits(told: &Told) {
    assert_eq!(told.recv_timeout(LITTLE), Err(RecvTimeoutError::Timeout));
}

#[track_caller]
fn answer(told: &Told) -> Result<(), Error> {
    told.recv_timeout(PATIENCE).expect("an answer")
}

/// As if a second had passed.
fn tick(ram: &Ram) {
    ram.0.pages.look_at_room();
}

#[test]
fn writes_wait_until_others_make_room() {
    let (ram, pages) = full_disk(waiting(600));
    let told: Vec<_> = (0..3).map(|n| submit(&ram, pages + n)).collect();
    told.iter().for_each(waits);
    assert_eq!((ram.waiting(), ram.io_stat().failed_writes), (3, 0));
    // What is read, and what needs no memory, does not wait.
    let mut back = vec![0; PAGE_BYTES];
    ram.read_at(0, &mut back).unwrap();
    ram.write_at(900 * PAGE, &[7; 4096], Flags::empty()).unwrap();
    waits(&told[0]);
    // Who has waited longest goes on first.
    ram.discard(0, PAGE).unwrap();
    assert_eq!(answer(&told[0]), Ok(()), "there was room for one page");
    told[1..].iter().for_each(waits);
    ram.discard(PAGE, 2 * PAGE).unwrap();
    told[1..].iter().for_each(|told| assert_eq!(answer(told), Ok(())));
    for n in 0..3 {
        ram.read_at((pages + n) * PAGE, &mut back).unwrap();
        assert!(back == page(pages + n), "page {n}");
    }
    assert_eq!(ram.io_stat().failed_writes, 0);
}

#[test]
fn whatever_makes_room_wakes_who_waits() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(4 * MIB).unwrap();
    let told = submit(&ram, pages);
    waits(&told);
    ram.set_mem_limit(MIB + MIB / 2);
    assert_eq!(answer(&told), Ok(()), "the limit grows");
    let more = pages + 1 + fill(&ram, pages + 1);

    let told = submit(&ram, more);
    waits(&told);
    ram.write_zeroes(0, PAGE, Flags::empty()).unwrap();
    assert_eq!(answer(&told), Ok(()), "zeroes are written");

    // Another device of the family is rewound, or goes.
    ram.discard(0, 64 * PAGE).unwrap();
    fill(&other, 0);
    let told = submit(&ram, more + 1);
    waits(&told);
    other.rewind().unwrap();
    assert_eq!(answer(&told), Ok(()), "another one is rewound");
    fill(&other, 0);
    let told = submit(&other, 900);
    waits(&told);
    ram.reset().unwrap();
    assert_eq!(answer(&told), Ok(()), "another one is reset");
    fill(&other, 256);
    let told = submit(&ram, 0);
    waits(&told);
    drop(other);
    assert_eq!(answer(&told), Ok(()), "another one is removed");

    // Nobody tells of this: it is found at the next look.
    let more = 1 + fill(&ram, 1);
    let told = submit(&ram, more);
    waits(&told);
    (1..9).for_each(|slot| ram.write_at(slot * PAGE, &[1; 4096], Flags::empty()).unwrap());
    waits(&told);
    tick(&ram);
    assert_eq!(answer(&told), Ok(()), "pages are overwritten with less");
}

#[test]
fn a_device_at_its_own_cap_waits_for_room_below_it() {
    let disk = ram(4 * MIB);
    let family = disk.family();
    family.set_when_full(waiting(600));
    let snapshot = disk.snapshot().unwrap();
    let fork = snapshot.fork(&ForkConfig { mem_limit: MIB, ..ForkConfig::default() }).unwrap();
    let pages = fill(&fork, 0);
    let told = submit(&fork, pages);
    waits(&told);
    assert_eq!((fork.waiting(), disk.waiting()), (1, 0));
    disk.write_at(0, &page(0), Flags::empty()).unwrap();
    family.set_mem_limit(0);
    waits(&told);
    fork.set_own_limits(2 * MIB, 0).unwrap();
    assert_eq!(answer(&told), Ok(()));
}

#[test]
fn who_waited_in_vain_fails_and_so_do_others_until_room_comes() {
    let (ram, pages) = full_disk(waiting(4));
    let told = submit(&ram, pages);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        tick(&ram);
        waits(&told);
    }
    let late = submit(&ram, pages + 1);
    std::thread::sleep(Duration::from_millis(3200));
    tick(&ram);
    assert_eq!(answer(&told), Err(Error::NoSpace));
    assert_eq!(answer(&late), Err(Error::NoSpace), "the device has given up");
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace));
    let tried = ram.try_io(&Request::write(pages * PAGE, PAGE), Buffer::Write(&page(pages)));
    assert_eq!(tried, Err(Error::NoSpace));
    assert_eq!(ram.io_stat().failed_writes, 4);
    // After room has come they wait again.
    ram.discard(0, PAGE).unwrap();
    assert_eq!(fill(&ram, pages), 1);
    let told = submit(&ram, pages + 1);
    waits(&told);
    ram.discard(PAGE, PAGE).unwrap();
    assert_eq!(answer(&told), Ok(()));
}

#[test]
fn the_end_of_a_device_and_of_waiting_end_all_that_waits() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(MIB).unwrap();
    let (told, others) = (submit(&ram, pages), submit(&other, 0));
    waits(&told);
    let now = ram.no_waiting();
    assert_eq!(answer(&told), Err(Error::NoSpace));
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace), "nor does one wait that comes");
    waits(&others);
    let second = ram.no_waiting();
    drop(now);
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace));
    drop(second);
    let told = submit(&ram, pages);
    waits(&told);
    ram.family().set_when_full(WhenFull::default());
    assert_eq!((answer(&told), answer(&others)), (Err(Error::NoSpace), Err(Error::NoSpace)));
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace), "they do not wait any more");
}

#[test]
fn a_device_waits_or_fails_as_it_says_itself() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(MIB).unwrap();
    let told = submit(&other, 0);
    waits(&told);
    other.set_own_wait(Some(false));
    assert_eq!(answer(&told), Err(Error::NoSpace), "it does not wait any more");
    assert_eq!(answer(&submit(&other, 0)), Err(Error::NoSpace));
    let told = submit(&ram, pages);
    waits(&told);
    // The other way round.
    ram.set_own_wait(Some(true));
    ram.family().set_when_full(WhenFull { wait: false, ..waiting(1) });
    other.set_own_wait(None);
    assert_eq!(answer(&submit(&other, 0)), Err(Error::NoSpace));
    waits(&told);
    // The time is the family's. What is set anew begins anew.
    std::thread::sleep(Duration::from_millis(1100));
    tick(&ram);
    assert_eq!(answer(&told), Err(Error::NoSpace));
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace), "it has given up");
    ram.set_own_wait(Some(true));
    let told = submit(&ram, pages);
    waits(&told);
    ram.discard(0, PAGE).unwrap();
    assert_eq!(answer(&told), Ok(()));
    assert_eq!((ram.own_wait(), other.own_wait()), (Some(true), None));
}

#[test]
fn a_snapshot_begins_beside_writes_that_wait() {
    let (ram, pages) = full_disk(waiting(600));
    let told = submit(&ram, pages);
    waits(&told);
    let began = Instant::now();
    let snapshot = ram.snapshot().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "it does not wait for them");
    waits(&told);
    ram.set_mem_limit(2 * MIB);
    assert_eq!(answer(&told), Ok(()));
    let mut back = vec![1; PAGE_BYTES];
    snapshot.read_at(pages * PAGE, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "what was not answered is not in it");
}

#[test]
fn a_full_backing_device_makes_writes_wait_as_well() {
    let when_full = waiting(600);
    let backing: std::sync::Arc<dyn Device> = std::sync::Arc::new(self::ram(64 * PAGE));
    let config = Config { mem_limit: MIB, when_full, ..config(8 * MIB) }.backed_by(backing, true);
    let ram = Ram::new(config).unwrap();
    let mut slot = 0;
    let told = loop {
        let told = submit(&ram, slot);
        let mut looks = 0;
        let done = loop {
            match told.recv_timeout(LITTLE) {
                // Pages may just be on their way to the device.
                Err(_) if ram.waiting() == 1 && looks == 40 => break None,
                Err(_) => looks += i32::from(ram.waiting() == 1),
                Ok(done) => break Some(done),
            }
        };
        match done {
            Some(done) => done.unwrap(),
            None => break told,
        }
        slot += 1;
    };
    assert!((256..350).contains(&slot), "{slot} pages fit");
    ram.discard(0, 64 * PAGE).unwrap();
    assert_eq!(answer(&told), Ok(()));
}

#[test]
fn the_clock_ends_the_waiting() {
    let ram = Ram::new(Config { mem_limit: MIB, when_full: waiting(1), ..config(4 * MIB) }).unwrap();
    let pages = fill(&ram, 0);
    let began = Instant::now();
    assert_eq!(answer(&submit(&ram, pages)), Err(Error::NoSpace));
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
}
