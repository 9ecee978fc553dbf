//! Tests of writes that wait for space.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{MIB, config, content, ram};
use crate::ram::device::parts::FamilyParts;
use crate::ram::family::threads::tests::submit;
use crate::ram::geometry::PAGE;
use crate::ram::*;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking, Buffer, Device, Error, Flags, Request, TryResult};

/// Maximum time that a test waits for an event that must happen.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time that a test waits to see that an event does not happen.
const QUIET_TIME: Duration = Duration::from_millis(50);

type WriteResult = Receiver<Result<(), Error>>;

/// Returns a policy by which writes wait for at most this many seconds.
fn waiting(seconds: u64) -> FullPolicy {
    FullPolicy { wait: true, timeout: Duration::from_secs(seconds), ..FullPolicy::default() }
}

/// Returns incompressible content for a page.
fn page(slot: u64) -> Vec<u8> {
    content(5, slot, PAGE_BYTES)
}

/// Writes pages from `first` on until a write finds no space. Returns the number of pages written.
fn fill(ram: &Ram, first: u64) -> u64 {
    let full = |slot: &u64| {
        let tried = ram.try_io(&Request::write(slot * PAGE, PAGE), Buffer::Write(&page(*slot)));
        assert!(matches!(tried, Ok(TryResult::Done | TryResult::WouldBlock)), "{tried:?}: it may wait");
        tried == Ok(TryResult::WouldBlock)
    };
    (first..first + 1000).find(full).unwrap() - first
}

/// Creates a full disk. Returns the disk and its number of pages. The once-a-second check does not
/// run, so a missed wake-up makes a request wait for ever.
fn full_disk(full_policy: FullPolicy) -> (Ram, u64) {
    let parts = FamilyParts::new(Config { full_policy, ..Config::default() }).unwrap();
    crate::ram::family::threads::prepare_keeper(&parts);
    let family = Family(parts);
    family.set_mem_limit(MIB);
    let ram = family.ram(4 * MIB).unwrap();
    let pages = fill(&ram, 0);
    assert!((200..=256).contains(&pages), "{pages}");
    (ram, pages)
}

#[track_caller]
fn assert_waiting(result: &WriteResult) {
    assert_eq!(result.recv_timeout(QUIET_TIME), Err(RecvTimeoutError::Timeout));
}

#[track_caller]
fn wait_for_result(result: &WriteResult) -> Result<(), Error> {
    result.recv_timeout(PATIENCE).expect("the request does not complete")
}

fn tick(ram: &Ram) {
    ram.0.pages.check_space();
}

#[test]
fn write_without_space_waits_for_discard() {
    let (ram, pages) = full_disk(waiting(600));
    let result: Vec<_> = (0..3).map(|n| submit(&ram, pages + n)).collect();
    result.iter().for_each(assert_waiting);
    assert_eq!((ram.waiting_requests(), ram.io_stat().failed_writes), (3, 0));
    // Reads, and writes that need no memory, do not wait for space.
    let mut back = vec![0; PAGE_BYTES];
    ram.read_at(0, &mut back).unwrap();
    ram.write_at(900 * PAGE, &[7; 4096], Flags::empty()).unwrap();
    assert_waiting(&result[0]);
    // The request that waits longest continues first.
    ram.discard(0, PAGE).unwrap();
    assert_eq!(wait_for_result(&result[0]), Ok(()), "there was room for one page");
    result[1..].iter().for_each(assert_waiting);
    ram.discard(PAGE, 2 * PAGE).unwrap();
    result[1..].iter().for_each(|result| assert_eq!(wait_for_result(result), Ok(())));
    for n in 0..3 {
        ram.read_at((pages + n) * PAGE, &mut back).unwrap();
        assert!(back == page(pages + n), "page {n}");
    }
    assert_eq!(ram.io_stat().failed_writes, 0);
}

#[test]
fn freed_space_wakes_waiting_writes() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(4 * MIB).unwrap();
    let result = submit(&ram, pages);
    assert_waiting(&result);
    ram.set_mem_limit(MIB + MIB / 2);
    assert_eq!(wait_for_result(&result), Ok(()), "the limit grows");
    let more = pages + 1 + fill(&ram, pages + 1);

    let result = submit(&ram, more);
    assert_waiting(&result);
    ram.write_zeroes(0, PAGE, Flags::empty()).unwrap();
    assert_eq!(wait_for_result(&result), Ok(()), "zeroes are written");

    // Space is freed by another device of the family, which is rewound, reset or removed.
    ram.discard(0, 64 * PAGE).unwrap();
    fill(&other, 0);
    let result = submit(&ram, more + 1);
    assert_waiting(&result);
    other.rewind().unwrap();
    assert_eq!(wait_for_result(&result), Ok(()), "another one is rewound");
    fill(&other, 0);
    let result = submit(&other, 900);
    assert_waiting(&result);
    ram.reset().unwrap();
    assert_eq!(wait_for_result(&result), Ok(()), "another one is reset");
    fill(&other, 256);
    let result = submit(&ram, 0);
    assert_waiting(&result);
    drop(other);
    assert_eq!(wait_for_result(&result), Ok(()), "another one is removed");

    // Overwriting pages with smaller objects wakes no request: the next once-a-second check finds
    // the space.
    let more = 1 + fill(&ram, 1);
    let result = submit(&ram, more);
    assert_waiting(&result);
    (1..9).for_each(|slot| ram.write_at(slot * PAGE, &[1; 4096], Flags::empty()).unwrap());
    assert_waiting(&result);
    tick(&ram);
    assert_eq!(wait_for_result(&result), Ok(()), "pages are overwritten with less");
}

#[test]
fn write_at_cap_waits_for_space_under_cap() {
    let disk = ram(4 * MIB);
    let family = disk.family();
    family.set_full_policy(waiting(600));
    let snapshot = disk.snapshot().unwrap();
    let fork = snapshot.fork(&ForkConfig { mem_limit: MIB, ..ForkConfig::default() }).unwrap();
    let pages = fill(&fork, 0);
    let result = submit(&fork, pages);
    assert_waiting(&result);
    assert_eq!((fork.waiting_requests(), disk.waiting_requests()), (1, 0));
    disk.write_at(0, &page(0), Flags::empty()).unwrap();
    family.set_mem_limit(0);
    assert_waiting(&result);
    fork.set_own_limits(2 * MIB, 0).unwrap();
    assert_eq!(wait_for_result(&result), Ok(()));
}

#[test]
fn wait_timeout_fails_writes_until_space_is_freed() {
    let (ram, pages) = full_disk(waiting(4));
    let result = submit(&ram, pages);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        tick(&ram);
        assert_waiting(&result);
    }
    let late = submit(&ram, pages + 1);
    std::thread::sleep(Duration::from_millis(3200));
    tick(&ram);
    assert_eq!(wait_for_result(&result), Err(Error::NoSpace));
    assert_eq!(wait_for_result(&late), Err(Error::NoSpace), "the device has given up");
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace));
    let tried = ram.try_io(&Request::write(pages * PAGE, PAGE), Buffer::Write(&page(pages)));
    assert_eq!(tried, Err(Error::NoSpace));
    assert_eq!(ram.io_stat().failed_writes, 4);
    // After space was freed, requests that find no space wait again.
    ram.discard(0, PAGE).unwrap();
    assert_eq!(fill(&ram, pages), 1);
    let result = submit(&ram, pages + 1);
    assert_waiting(&result);
    ram.discard(PAGE, PAGE).unwrap();
    assert_eq!(wait_for_result(&result), Ok(()));
}

#[test]
fn disable_waiting_fails_waiting_writes() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(MIB).unwrap();
    let (result, others) = (submit(&ram, pages), submit(&other, 0));
    assert_waiting(&result);
    let now = ram.disable_waiting();
    assert_eq!(wait_for_result(&result), Err(Error::NoSpace));
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace), "nor does one wait that comes");
    assert_waiting(&others);
    let second = ram.disable_waiting();
    drop(now);
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace));
    drop(second);
    let result = submit(&ram, pages);
    assert_waiting(&result);
    ram.family().set_full_policy(FullPolicy::default());
    assert_eq!(
        (wait_for_result(&result), wait_for_result(&others)),
        (Err(Error::NoSpace), Err(Error::NoSpace))
    );
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace), "they do not wait any more");
}

#[test]
fn own_wait_overrides_family_policy() {
    let (ram, pages) = full_disk(waiting(600));
    let other = ram.family().ram(MIB).unwrap();
    let result = submit(&other, 0);
    assert_waiting(&result);
    other.set_wait_override(Some(false));
    assert_eq!(wait_for_result(&result), Err(Error::NoSpace), "it does not wait any more");
    assert_eq!(wait_for_result(&submit(&other, 0)), Err(Error::NoSpace));
    let result = submit(&ram, pages);
    assert_waiting(&result);
    // Now the device waits for space by its own policy, and the family does not wait.
    ram.set_wait_override(Some(true));
    ram.family().set_full_policy(FullPolicy { wait: false, ..waiting(1) });
    other.set_wait_override(None);
    assert_eq!(wait_for_result(&submit(&other, 0)), Err(Error::NoSpace));
    assert_waiting(&result);
    // The device uses the family's time-out. Setting the device's policy clears its time-out state.
    std::thread::sleep(Duration::from_millis(1100));
    tick(&ram);
    assert_eq!(wait_for_result(&result), Err(Error::NoSpace));
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace), "it has given up");
    ram.set_wait_override(Some(true));
    let result = submit(&ram, pages);
    assert_waiting(&result);
    ram.discard(0, PAGE).unwrap();
    assert_eq!(wait_for_result(&result), Ok(()));
    assert_eq!((ram.wait_override(), other.wait_override()), (Some(true), None));
}

#[test]
fn snapshot_ignores_waiting_writes() {
    let (ram, pages) = full_disk(waiting(600));
    let result = submit(&ram, pages);
    assert_waiting(&result);
    let began = Instant::now();
    let snapshot = ram.snapshot().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "it does not wait for them");
    assert_waiting(&result);
    ram.set_mem_limit(2 * MIB);
    assert_eq!(wait_for_result(&result), Ok(()));
    let mut back = vec![1; PAGE_BYTES];
    snapshot.read_at(pages * PAGE, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "what was not answered is not in it");
}

#[test]
fn full_backing_device_makes_writes_wait() {
    let full_policy = waiting(600);
    let backing: std::sync::Arc<dyn Device> = std::sync::Arc::new(self::ram(64 * PAGE));
    let config = Config { mem_limit: MIB, full_policy, ..config(8 * MIB) }.backed_by(backing, true);
    let ram = Ram::new(config).unwrap();
    let mut slot = 0;
    let result = loop {
        let result = submit(&ram, slot);
        let mut looks = 0;
        let done = loop {
            match result.recv_timeout(QUIET_TIME) {
                // Poll for some time before the request counts as blocked, as evictions may be in
                // progress.
                Err(_) if ram.waiting_requests() == 1 && looks == 40 => break None,
                Err(_) => looks += i32::from(ram.waiting_requests() == 1),
                Ok(done) => break Some(done),
            }
        };
        match done {
            Some(done) => done.unwrap(),
            None => break result,
        }
        slot += 1;
    };
    assert!((256..350).contains(&slot), "{slot} pages fit");
    ram.discard(0, 64 * PAGE).unwrap();
    assert_eq!(wait_for_result(&result), Ok(()));
}

#[test]
fn clock_ends_waits() {
    let ram = Ram::new(Config { mem_limit: MIB, full_policy: waiting(1), ..config(4 * MIB) }).unwrap();
    let pages = fill(&ram, 0);
    let began = Instant::now();
    assert_eq!(wait_for_result(&submit(&ram, pages)), Err(Error::NoSpace));
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
}
