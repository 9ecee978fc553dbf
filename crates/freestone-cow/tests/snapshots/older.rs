//! Reopened exception stores: detection of origin writes that a store missed while it was not open.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking, Device, Flags};
use freestone_cow::cow::{Config, LastSession, MissedWrites, Notes, Origin, SetupError, Stamp, StoreKind};

use crate::support::{Kind, bytes, config, read, read_all};

const SIZE: u64 = 256 << 10;
const COW_SIZE: u64 = 1 << 20;
const NONE: Flags = Flags::empty();
/// Range of the store's header, in bytes, that records a clean close.
const CLOSED: std::ops::Range<usize> = 48..72;

fn persistent() -> Config {
    Config { force: false, ..config(StoreKind::Persistent, 4096) }
}

/// Notes in memory that outlive their origin.
#[derive(Clone, Default)]
struct MemoryNotes {
    left: Arc<Mutex<Option<LastSession>>>,
    /// True if the session of an origin cannot be recorded.
    cannot: bool,
}

impl Notes for MemoryNotes {
    fn merge_id(&self) -> Option<u64> {
        None
    }
    fn record_merge(&self, _: u64, _: &str) {}
    fn remove_merge(&self) -> bool {
        true
    }
    fn last_session(&self) -> Option<LastSession> {
        *self.left.lock().unwrap()
    }
    fn record_in_use(&self) -> bool {
        if !self.cannot {
            *self.left.lock().unwrap() = Some(LastSession::InUse);
        }
        !self.cannot
    }
    fn record_close(&self, content: Stamp) {
        *self.left.lock().unwrap() = Some(LastSession::Closed { content, changed: false });
    }
}

struct Disk {
    below: Arc<dyn Device>,
    beside: MemoryNotes,
}

impl Disk {
    fn new(cannot: bool) -> Self {
        Self { below: Kind::File.make(SIZE), beside: MemoryNotes { cannot, ..MemoryNotes::default() } }
    }

    fn origin(&self) -> Origin {
        Origin::with_notes(self.below.clone(), Some(Box::new(self.beside.clone())))
    }
}

fn cow() -> Arc<dyn Device> {
    Kind::File.make(COW_SIZE)
}

fn says_closed(cow: &dyn Device) -> bool {
    read(cow, 0, 512)[CLOSED] != [0; 24]
}

/// Waits until `is` returns true. The close may be late: it happens when the thread of the last
/// completion releases the device.
fn wait_until(is: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < late, "it was not closed");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn clean_close_is_recorded_by_store_and_origin() {
    // The devices are files, because a persistent store over a device in memory would need force.
    let (disk, cow) = (Disk::new(false), cow());
    for round in 0..3 {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), MissedWrites::Nothing);
        assert_eq!(disk.beside.last_session(), Some(LastSession::InUse));
        assert!(!says_closed(&*cow), "a crash now would be taken for an end in order");
        origin.write_at(round * 4096, &bytes(round, 4096), NONE).unwrap();
        drop((origin, snapshot));
        wait_until(|| {
            says_closed(&*cow) && matches!(disk.beside.last_session(), Some(LastSession::Closed { .. }))
        });
    }
}

#[test]
fn refused_store_is_unchanged() {
    let (disk, cow) = (Disk::new(false), cow());
    let origin = disk.origin();
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    origin.write_at(0, &bytes(1, 4096), NONE).unwrap();
    snapshot.remove();
    drop(snapshot);
    wait_until(|| says_closed(&*cow));
    origin.write_at(8192, &bytes(2, 4096), NONE).unwrap();
    let before = read_all(&*cow);
    let refused = origin.snapshot(cow.clone(), &persistent());
    assert!(matches!(refused, Err(SetupError::OriginChanged)), "{refused:?}");
    drop(origin);
    wait_until(|| matches!(disk.beside.last_session(), Some(LastSession::Closed { .. })));
    let origin = disk.origin();
    let refused = origin.snapshot(cow.clone(), &persistent());
    assert!(matches!(refused, Err(SetupError::OriginChanged)), "{refused:?}");
    assert!(read_all(&*cow) == before);
    // The store also misses writes between its check and the start of the snapshot.
    let forced = Config { force: true, ..persistent() };
    let snapshot = origin.snapshot(cow.clone(), &forced).unwrap();
    assert_eq!(snapshot.missed_writes(), MissedWrites::Writes);
    drop(snapshot);
    wait_until(|| says_closed(&*cow));
    let mut pending = origin.prepare_snapshot(cow, &persistent()).unwrap();
    origin.write_at(0, &bytes(3, 4096), NONE).unwrap();
    freestone_core::consistency_group::take_snapshots(&mut [&mut pending]).unwrap();
    assert_eq!(pending.into_snapshot().missed_writes(), MissedWrites::Writes);
}

#[test]
fn missed_writes_are_unknown_without_notes() {
    let (disk, cow) = (Disk::new(true), cow());
    for missed in [MissedWrites::Nothing, MissedWrites::Unknown] {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), missed);
        drop((origin, snapshot));
        assert!(!says_closed(&*cow), "the header stays the kernel's");
    }
}
