//! Reopened stores: detection of origin writes that the store missed.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use freestone::cow::{Config, Left, Missed, Notes, Origin, SetupError, Stamp, StoreKind};
use freestone::device::{Blocking, Device, Flags};

use crate::cow::support::{Kind, bytes, config, read, read_all};

const SIZE: u64 = 256 << 10;
const COW_SIZE: u64 = 1 << 20;
const NONE: Flags = Flags::empty();
/// Header bytes that record a clean close.
const CLOSED: std::ops::Range<usize> = 48..72;

fn persistent() -> Config {
    Config { force: false, ..config(StoreKind::Persistent, 4096) }
}

/// Notes that outlive an origin.
#[derive(Clone, Default)]
struct MemoryNotes {
    left: Arc<Mutex<Option<Left>>>,
    /// True if notes cannot be stored.
    cannot: bool,
}

impl Notes for MemoryNotes {
    fn merge(&self) -> Option<u64> {
        None
    }
    fn merge_begins(&self, _: u64, _: &str) {}
    fn merge_ended(&self) -> bool {
        true
    }
    fn left(&self) -> Option<Left> {
        *self.left.lock().unwrap()
    }
    fn in_use(&self) -> bool {
        if !self.cannot {
            *self.left.lock().unwrap() = Some(Left::InUse);
        }
        !self.cannot
    }
    fn closed(&self, content: Stamp) {
        *self.left.lock().unwrap() = Some(Left::Closed { content, changed: false });
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
        Origin::noted(self.below.clone(), Some(Box::new(self.beside.clone())))
    }
}

fn cow() -> Arc<dyn Device> {
    Kind::File.make(COW_SIZE)
}

fn says_closed(cow: &dyn Device) -> bool {
    read(cow, 0, 512)[CLOSED] != [0; 24]
}

/// Waits for the close, which happens when the thread of the last completion releases the device.
fn wait_until(is: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < late, "it was not closed");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn clean_close_is_recorded_by_store_and_origin() {
    // Persistent stores of devices in memory would need force.
    let (disk, cow) = (Disk::new(false), cow());
    for round in 0..3 {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), Missed::Nothing);
        assert_eq!(disk.beside.left(), Some(Left::InUse));
        assert!(!says_closed(&*cow), "a crash now would be taken for an end in order");
        origin.write_at(round * 4096, &bytes(round, 4096), NONE).unwrap();
        drop((origin, snapshot));
        wait_until(|| says_closed(&*cow) && matches!(disk.beside.left(), Some(Left::Closed { .. })));
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
    assert!(matches!(refused, Err(SetupError::Older)), "{refused:?}");
    drop(origin);
    wait_until(|| matches!(disk.beside.left(), Some(Left::Closed { .. })));
    let origin = disk.origin();
    let refused = origin.snapshot(cow.clone(), &persistent());
    assert!(matches!(refused, Err(SetupError::Older)), "{refused:?}");
    assert!(read_all(&*cow) == before);
    // Writes between the check and the start of the snapshot are missed as well.
    let forced = Config { force: true, ..persistent() };
    let snapshot = origin.snapshot(cow.clone(), &forced).unwrap();
    assert_eq!(snapshot.missed_writes(), Missed::Writes);
    drop(snapshot);
    wait_until(|| says_closed(&*cow));
    let mut pending = origin.prepare_snapshot(cow, &persistent()).unwrap();
    origin.write_at(0, &bytes(3, 4096), NONE).unwrap();
    freestone::consistency_group::take(&mut [&mut pending]).unwrap();
    assert_eq!(pending.into_snapshot().missed_writes(), Missed::Writes);
}

#[test]
fn missed_writes_are_unknown_without_notes() {
    let (disk, cow) = (Disk::new(true), cow());
    for missed in [Missed::Nothing, Missed::Unknown] {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), missed);
        drop((origin, snapshot));
        assert!(!says_closed(&*cow), "the header stays the kernel's");
    }
}
