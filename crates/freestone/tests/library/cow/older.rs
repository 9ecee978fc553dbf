//! What is known of a store that is opened again: whether it missed writes of its origin.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use freestone::cow::{Config, Left, Missed, Notes, Origin, SetupError, Stamp, StoreKind};
use freestone::device::{Blocking, Device, Flags};

use crate::cow::support::{Kind, bytes, config, read, read_all};

const SIZE: u64 = 256 << 10;
const COW_SIZE: u64 = 1 << 20;
const NONE: Flags = Flags::empty();
/// Bytes of the header that say that the store was closed.
const CLOSED: std::ops::Range<usize> = 48..72;

fn persistent() -> Config {
    Config { force: false, ..config(StoreKind::Persistent, 4096) }
}

/// Notes that outlive an origin.
#[derive(Clone, Default)]
struct Beside {
    left: Arc<Mutex<Option<Left>>>,
    /// Where nothing can be kept beside the data.
    cannot: bool,
}

impl Notes for Beside {
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
    beside: Beside,
}

impl Disk {
    fn new(cannot: bool) -> Self {
        Self { below: Kind::File.make(SIZE), beside: Beside { cannot, ..Beside::default() } }
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

/// What is dropped is closed when the thread that answered its last request has left.
fn soon(is: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < late, "it was not closed");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn both_say_how_they_were_closed_and_neither_while_in_use() {
    // What is made of memory would have to be forced.
    let (disk, cow) = (Disk::new(false), cow());
    for round in 0..3 {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), Missed::Nothing);
        assert_eq!(disk.beside.left(), Some(Left::InUse));
        assert!(!says_closed(&*cow), "a crash now would be taken for an end in order");
        origin.write_at(round * 4096, &bytes(round, 4096), NONE).unwrap();
        drop((origin, snapshot));
        soon(|| says_closed(&*cow) && matches!(disk.beside.left(), Some(Left::Closed { .. })));
    }
}

#[test]
fn what_is_refused_is_left_as_it_is() {
    let (disk, cow) = (Disk::new(false), cow());
    let origin = disk.origin();
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    origin.write_at(0, &bytes(1, 4096), NONE).unwrap();
    snapshot.remove();
    drop(snapshot);
    soon(|| says_closed(&*cow));
    origin.write_at(8192, &bytes(2, 4096), NONE).unwrap();
    let before = read_all(&*cow);
    let refused = origin.snapshot(cow.clone(), &persistent());
    assert!(matches!(refused, Err(SetupError::Older)), "{refused:?}");
    drop(origin);
    soon(|| matches!(disk.beside.left(), Some(Left::Closed { .. })));
    let origin = disk.origin();
    let refused = origin.snapshot(cow.clone(), &persistent());
    assert!(matches!(refused, Err(SetupError::Older)), "{refused:?}");
    assert!(read_all(&*cow) == before);
    // What is written between the look and the beginning is missed as well.
    let forced = Config { force: true, ..persistent() };
    let snapshot = origin.snapshot(cow.clone(), &forced).unwrap();
    assert_eq!(snapshot.missed_writes(), Missed::Writes);
    drop(snapshot);
    soon(|| says_closed(&*cow));
    let mut pending = origin.prepare_snapshot(cow, &persistent()).unwrap();
    origin.write_at(0, &bytes(3, 4096), NONE).unwrap();
    freestone::consistency_group::take(&mut [&mut pending]).unwrap();
    assert_eq!(pending.into_snapshot().missed_writes(), Missed::Writes);
}

#[test]
fn where_nothing_is_kept_beside_the_data_nobody_knows() {
    let (disk, cow) = (Disk::new(true), cow());
    for missed in [Missed::Nothing, Missed::Unknown] {
        let origin = disk.origin();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        assert_eq!(snapshot.missed_writes(), missed);
        drop((origin, snapshot));
        assert!(!says_closed(&*cow), "the header stays the kernel's");
    }
}
