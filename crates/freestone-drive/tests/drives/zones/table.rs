//! The state machine of zones as a table: every operation in every state, with and without limits.
//!
//! A zone has eight blocks, six of which can be written. A row has a state, an operation and the
//! result. The following state, write pointer (in blocks) and resources (numbers of implicitly
//! open, explicitly open and closed zones) are checked.

use std::sync::Arc;

use freestone_core::device::zoned::{Zone, ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Device, Error, Flags, Op, Request};
use freestone_drive::null::{self, Memory, Null};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model};

const BLOCK: u64 = 4096;
const ZONE: u64 = 8 * BLOCK;
const CAPACITY: u64 = 6;
const ZONES: u64 = 16;
/// Number of the zone under test. Zones 0 and 1 are conventional.
const TARGET: u64 = 5;

use ZoneCondition::{
    Closed, Empty, ExplicitOpen as Explicit, Full, ImplicitOpen as Implicit, NotWritePointer, Offline,
    ReadOnly,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Writes one block at this distance, in blocks, from the start of the zone.
    Write(u64),
    /// Writes this number of blocks at the write pointer.
    WriteMany(u64),
    /// Writes one block of zeroes at the write pointer.
    Zeroes,
    /// Appends one block to the zone.
    Append,
    Open,
    Close,
    Finish,
    Reset,
    ResetAll,
    SetReadOnly,
    SetOffline,
    Read,
}
use Act::{
    Append, Close, Finish, Open, Read, Reset, ResetAll, SetOffline, SetReadOnly, Write, WriteMany, Zeroes,
};

type Outcome = Result<(), Error>;
const OK: Outcome = Ok(());
const CONDITION: Outcome = Err(Error::ZoneCondition);
const POINTER: Outcome = Err(Error::ZoneWritePointer);
const BOUNDARY: Outcome = Err(Error::ZoneBoundary);

/// How a zone was brought into its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Empty,
    /// Opened implicitly by a write of two blocks.
    Implicit,
    /// Opened explicitly, with nothing written.
    ExplicitEmpty,
    /// Opened explicitly, with two blocks written.
    Explicit,
    /// Closed after a write of two blocks.
    Closed,
    /// Written up to its capacity.
    Full,
    /// Finished after a write of two blocks.
    Finished,
    ReadOnly,
    Offline,
    Conventional,
}

/// State, operation, result, then the zone's condition and write pointer after the operation.
type Row = (From, Act, Outcome, (ZoneCondition, u64));

#[rustfmt::skip]
const TABLE: &[Row] = &[
    (From::Empty, Write(0), OK, (Implicit, 1)),
    (From::Empty, Write(1), POINTER, (Empty, 0)),
    (From::Empty, WriteMany(6), OK, (Full, 6)),
    (From::Empty, WriteMany(7), POINTER, (Empty, 0)),
    (From::Empty, WriteMany(9), BOUNDARY, (Empty, 0)),
    (From::Empty, Zeroes, OK, (Implicit, 1)),
    (From::Empty, Append, OK, (Implicit, 1)),
    (From::Empty, Open, OK, (Explicit, 0)),
    (From::Empty, Close, CONDITION, (Empty, 0)),
    (From::Empty, Finish, OK, (Full, 8)),
    (From::Empty, Reset, OK, (Empty, 0)),
    (From::Empty, ResetAll, OK, (Empty, 0)),
    (From::Empty, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Empty, SetOffline, OK, (Offline, 8)),
    (From::Empty, Read, OK, (Empty, 0)),

    (From::Implicit, Write(2), OK, (Implicit, 3)),
    (From::Implicit, Write(1), POINTER, (Implicit, 2)),
    (From::Implicit, Write(3), POINTER, (Implicit, 2)),
    (From::Implicit, WriteMany(4), OK, (Full, 6)),
    (From::Implicit, WriteMany(5), POINTER, (Implicit, 2)),
    (From::Implicit, Zeroes, OK, (Implicit, 3)),
    (From::Implicit, Append, OK, (Implicit, 3)),
    (From::Implicit, Open, OK, (Explicit, 2)),
    (From::Implicit, Close, OK, (Closed, 2)),
    (From::Implicit, Finish, OK, (Full, 8)),
    (From::Implicit, Reset, OK, (Empty, 0)),
    (From::Implicit, ResetAll, OK, (Empty, 0)),
    (From::Implicit, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Implicit, SetOffline, OK, (Offline, 8)),
    (From::Implicit, Read, OK, (Implicit, 2)),

    (From::ExplicitEmpty, Write(0), OK, (Explicit, 1)),
    (From::ExplicitEmpty, Write(1), POINTER, (Explicit, 0)),
    (From::ExplicitEmpty, WriteMany(6), OK, (Full, 6)),
    (From::ExplicitEmpty, Zeroes, OK, (Explicit, 1)),
    (From::ExplicitEmpty, Append, OK, (Explicit, 1)),
    (From::ExplicitEmpty, Open, OK, (Explicit, 0)),
    (From::ExplicitEmpty, Close, OK, (Empty, 0)),
    (From::ExplicitEmpty, Finish, OK, (Full, 8)),
    (From::ExplicitEmpty, Reset, OK, (Empty, 0)),
    (From::ExplicitEmpty, ResetAll, OK, (Empty, 0)),
    (From::ExplicitEmpty, SetReadOnly, OK, (ReadOnly, 8)),
    (From::ExplicitEmpty, SetOffline, OK, (Offline, 8)),
    (From::ExplicitEmpty, Read, OK, (Explicit, 0)),

    (From::Explicit, Write(2), OK, (Explicit, 3)),
    (From::Explicit, Write(0), POINTER, (Explicit, 2)),
    (From::Explicit, WriteMany(4), OK, (Full, 6)),
    (From::Explicit, Zeroes, OK, (Explicit, 3)),
    (From::Explicit, Append, OK, (Explicit, 3)),
    (From::Explicit, Open, OK, (Explicit, 2)),
    (From::Explicit, Close, OK, (Closed, 2)),
    (From::Explicit, Finish, OK, (Full, 8)),
    (From::Explicit, Reset, OK, (Empty, 0)),
    (From::Explicit, ResetAll, OK, (Empty, 0)),
    (From::Explicit, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Explicit, SetOffline, OK, (Offline, 8)),
    (From::Explicit, Read, OK, (Explicit, 2)),

    (From::Closed, Write(2), OK, (Implicit, 3)),
    (From::Closed, Write(0), POINTER, (Closed, 2)),
    (From::Closed, WriteMany(4), OK, (Full, 6)),
    (From::Closed, WriteMany(5), POINTER, (Closed, 2)),
    (From::Closed, Zeroes, OK, (Implicit, 3)),
    (From::Closed, Append, OK, (Implicit, 3)),
    (From::Closed, Open, OK, (Explicit, 2)),
    (From::Closed, Close, OK, (Closed, 2)),
    (From::Closed, Finish, OK, (Full, 8)),
    (From::Closed, Reset, OK, (Empty, 0)),
    (From::Closed, ResetAll, OK, (Empty, 0)),
    (From::Closed, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Closed, SetOffline, OK, (Offline, 8)),
    (From::Closed, Read, OK, (Closed, 2)),

    (From::Full, Write(0), CONDITION, (Full, 6)),
    (From::Full, Write(6), CONDITION, (Full, 6)),
    (From::Full, Zeroes, CONDITION, (Full, 6)),
    (From::Full, Append, CONDITION, (Full, 6)),
    (From::Full, Open, CONDITION, (Full, 6)),
    (From::Full, Close, CONDITION, (Full, 6)),
    (From::Full, Reset, OK, (Empty, 0)),
    (From::Full, ResetAll, OK, (Empty, 0)),
    (From::Full, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Full, SetOffline, OK, (Offline, 8)),
    (From::Full, Read, OK, (Full, 6)),

    (From::Finished, Write(2), CONDITION, (Full, 8)),
    (From::Finished, Zeroes, CONDITION, (Full, 8)),
    (From::Finished, Append, CONDITION, (Full, 8)),
    (From::Finished, Open, CONDITION, (Full, 8)),
    (From::Finished, Close, CONDITION, (Full, 8)),
    (From::Finished, Finish, OK, (Full, 8)),
    (From::Finished, Reset, OK, (Empty, 0)),
    (From::Finished, ResetAll, OK, (Empty, 0)),
    (From::Finished, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Finished, SetOffline, OK, (Offline, 8)),
    (From::Finished, Read, OK, (Full, 8)),

    (From::ReadOnly, Write(0), CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Zeroes, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Append, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Open, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Close, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Finish, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, Reset, CONDITION, (ReadOnly, 8)),
    (From::ReadOnly, ResetAll, OK, (ReadOnly, 8)),
    (From::ReadOnly, SetReadOnly, OK, (Empty, 0)),
    (From::ReadOnly, SetOffline, OK, (Offline, 8)),
    (From::ReadOnly, Read, OK, (ReadOnly, 8)),

    (From::Offline, Write(0), CONDITION, (Offline, 8)),
    (From::Offline, Zeroes, CONDITION, (Offline, 8)),
    (From::Offline, Append, CONDITION, (Offline, 8)),
    (From::Offline, Open, CONDITION, (Offline, 8)),
    (From::Offline, Close, CONDITION, (Offline, 8)),
    (From::Offline, Finish, CONDITION, (Offline, 8)),
    (From::Offline, Reset, CONDITION, (Offline, 8)),
    (From::Offline, ResetAll, OK, (Offline, 8)),
    (From::Offline, SetReadOnly, OK, (ReadOnly, 8)),
    (From::Offline, SetOffline, OK, (Empty, 0)),
    (From::Offline, Read, CONDITION, (Offline, 8)),

    (From::Conventional, Write(3), OK, (NotWritePointer, 8)),
    (From::Conventional, Zeroes, OK, (NotWritePointer, 8)),
    (From::Conventional, Append, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, Open, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, Close, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, Finish, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, Reset, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, ResetAll, OK, (NotWritePointer, 8)),
    (From::Conventional, SetReadOnly, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, SetOffline, CONDITION, (NotWritePointer, 8)),
    (From::Conventional, Read, OK, (NotWritePointer, 8)),
];

/// Finishing a full zone depends on limits (true if there are any). Without limits, the kernel
/// moves the write pointer to the end.
const FINISH_OF_FULL: [(bool, Row); 2] =
    [(false, (From::Full, Finish, OK, (Full, 8))), (true, (From::Full, Finish, OK, (Full, 6)))];

struct Bench {
    zones: Zones,
}

impl Bench {
    fn new(backing: Arc<dyn Device>, max_open: u32, max_active: u32) -> Self {
        let config = Config {
            zone_size: ZONE,
            zone_capacity: CAPACITY * BLOCK,
            zone_nr_conv: 2,
            zone_max_open: max_open,
            zone_max_active: max_active,
            ..Config::default()
        };
        Self { zones: Zones::new(backing, config, StateLocation::Volatile, None).unwrap() }
    }

    fn zone(&self, zone: u64) -> Zone {
        let mut found = None;
        self.zones
            .report(zone * ZONE, &mut |row| {
                found = Some(row);
                false
            })
            .unwrap();
        found.unwrap()
    }

    fn state(&self, zone: u64) -> (ZoneCondition, u64) {
        let row = self.zone(zone);
        (row.condition, (row.write_pointer - row.start) / BLOCK)
    }

    fn write(&self, zone: u64, at: u64, blocks: u64) -> Outcome {
        let data = vec![zone as u8 + 1; (blocks * BLOCK) as usize];
        self.zones.write_at(zone * ZONE + at * BLOCK, &data, Flags::empty())
    }

    fn op(&self, op: ZoneOp, zone: u64) -> Outcome {
        self.zones.zone_op(op, zone * ZONE)
    }

    fn act(&self, act: Act, zone: u64) -> Outcome {
        let row = self.zone(zone);
        // For a zone without a write pointer, the reported pointer is the end of the zone, and
        // wraps to its start.
        let pointer = (row.write_pointer - row.start) / BLOCK % 8;
        match act {
            Write(at) => self.write(zone, at, 1),
            WriteMany(blocks) => self.write(zone, pointer, blocks),
            Zeroes => {
                let request = Request::new(Op::WriteZeroes, row.start + pointer * BLOCK, BLOCK);
                self.zones.run(request)
            }
            Append => self.append(zone).map(|at| assert_eq!(at, row.write_pointer)),
            Open => self.op(ZoneOp::Open, zone),
            Close => self.op(ZoneOp::Close, zone),
            Finish => self.op(ZoneOp::Finish, zone),
            Reset => self.op(ZoneOp::Reset, zone),
            ResetAll => self.zones.reset_all(),
            SetReadOnly => self.zones.set_read_only(row.start + BLOCK),
            SetOffline => self.zones.set_offline(row.start + BLOCK),
            Read => self.zones.read_at(row.start, &mut vec![0; ZONE as usize]),
        }
    }

    fn append(&self, zone: u64) -> Result<u64, Error> {
        let data = vec![0x77; BLOCK as usize];
        if let Some(at) = self.zones.try_append(zone * ZONE, &data, Flags::empty())? {
            return Ok(at);
        }
        let (tx, rx) = std::sync::mpsc::channel();
        let data = freestone_core::device::IoBuf::copy_of(&data).unwrap();
        self.zones.submit_append(zone * ZONE, data, Flags::empty(), Box::new(move |at| tx.send(at).unwrap()));
        rx.recv().unwrap()
    }

    fn prepare(&self, from: From, zone: u64) {
        let two = || self.write(zone, 0, 2).unwrap();
        match from {
            From::Empty | From::Conventional => {}
            From::Implicit => two(),
            From::ExplicitEmpty => self.op(ZoneOp::Open, zone).unwrap(),
            From::Explicit => {
                self.op(ZoneOp::Open, zone).unwrap();
                two();
            }
            From::Closed => {
                two();
                self.op(ZoneOp::Close, zone).unwrap();
            }
            From::Full => self.write(zone, 0, CAPACITY).unwrap(),
            From::Finished => {
                two();
                self.op(ZoneOp::Finish, zone).unwrap();
            }
            From::ReadOnly => self.zones.set_read_only(zone * ZONE).unwrap(),
            From::Offline => self.zones.set_offline(zone * ZONE).unwrap(),
        }
    }

    /// Returns the numbers of implicitly open, explicitly open and closed zones.
    fn resources(&self) -> (u32, u32, u32) {
        let counts = self.zones.counts();
        (counts.implicit_open, counts.explicit_open, counts.closed)
    }
}

fn resources(condition: ZoneCondition) -> (u32, u32, u32) {
    match condition {
        Implicit => (1, 0, 0),
        Explicit => (0, 1, 0),
        Closed => (0, 0, 1),
        _ => (0, 0, 0),
    }
}

fn memory() -> Arc<dyn Device> {
    Arc::new(Memory::new(null::Config::plain(ZONES * ZONE, BLOCK as u32)).unwrap())
}

fn bare() -> Arc<dyn Device> {
    Arc::new(Null::new(null::Config::plain(ZONES * ZONE, BLOCK as u32)).unwrap())
}

fn deferred() -> Arc<dyn Device> {
    let model = Model::new((ZONES * ZONE) as usize, BLOCK as u32);
    Arc::new(DeferringDevice::new(Arc::new(model), DeferPolicy::Always, 1))
}

#[test]
fn every_operation_in_every_state() {
    for make in [memory, bare, deferred] {
        for (max_open, max_active) in [(0, 0), (3, 0), (0, 3), (3, 3), (1, 1)] {
            let limited = max_open + max_active > 0;
            let special = FINISH_OF_FULL.iter().filter(|(when, _)| *when == limited).map(|(_, row)| row);
            for &(from, act, completion, (condition, pointer)) in TABLE.iter().chain(special) {
                let bench = Bench::new(make(), max_open, max_active);
                let target = if from == From::Conventional { 1 } else { TARGET };
                bench.prepare(from, target);
                let given = bench.act(act, target);
                let context = format!("{act:?} in {from:?}, limits {max_open} and {max_active}");
                assert_eq!(given, completion, "{context}");
                assert_eq!(bench.state(target), (condition, pointer), "{context}");
                assert_eq!(bench.resources(), resources(condition), "{context}");
                let others = (0..ZONES).filter(|&zone| zone != target && zone > 1);
                assert!(others.map(|zone| bench.state(zone)).all(|state| state == (Empty, 0)), "{context}");
                // With one open zone allowed, opening another zone shows whether the operation
                // released its resource.
                if max_open == 1 {
                    let free = resources(condition) == (0, 0, 0);
                    let next = bench.op(ZoneOp::Open, TARGET + 1);
                    assert_eq!(next.is_ok(), free, "{context}, then another zone: {next:?}");
                }
            }
        }
    }
}

/// Operations on zone 5 at limits that other zones have used up. Zones 8 and 9 are open, closed or
/// empty.
#[test]
#[rustfmt::skip]
fn operations_at_the_limits() {
    const OPEN: Outcome = Err(Error::ZoneTooManyOpen);
    const ACTIVE: Outcome = Err(Error::ZoneTooManyActive);
    // Limits of open and active zones; initial states of zones 5, 8 and 9; operation on zone 5;
    // result; final conditions of zones 5, 8 and 9.
    type Case = ((u32, u32), [From; 3], Act, Outcome, [ZoneCondition; 3]);
    let cases: &[Case] = &[
        // The device does not close explicitly open zones to make room for another one.
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Write(0), OPEN, [Empty, Explicit, Explicit]),
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Append, OPEN, [Empty, Explicit, Explicit]),
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Open, OPEN, [Empty, Explicit, Explicit]),
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Finish, OPEN, [Empty, Explicit, Explicit]),
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Reset, OK, [Empty, Explicit, Explicit]),
        // The position of a write is checked before its resources.
        ((2, 0), [From::Empty, From::Explicit, From::Explicit], Write(1), POINTER, [Empty, Explicit, Explicit]),
        // The device closes implicitly open zones in turn to make room for another one.
        ((2, 0), [From::Empty, From::Implicit, From::Implicit], Write(0), OK, [Implicit, Closed, Implicit]),
        ((2, 0), [From::Empty, From::Explicit, From::Implicit], Open, OK, [Explicit, Explicit, Closed]),
        ((2, 0), [From::Empty, From::Implicit, From::Implicit], Finish, OK, [Full, Closed, Implicit]),
        // The limit of active zones is not reached, so a closed zone can be opened if an implicitly
        // open one can be closed.
        ((2, 4), [From::Closed, From::Implicit, From::Implicit], Write(2), OK, [Implicit, Closed, Implicit]),
        ((2, 4), [From::Closed, From::Explicit, From::Explicit], Write(2), OPEN, [Closed, Explicit, Explicit]),
        ((2, 4), [From::Closed, From::Explicit, From::Explicit], Finish, OPEN, [Closed, Explicit, Explicit]),
        // At the limit of active zones, no further zone becomes active. No implicitly open zone is
        // closed, not even for a closed zone.
        ((0, 2), [From::Empty, From::Closed, From::Implicit], Write(0), ACTIVE, [Empty, Closed, Implicit]),
        ((0, 2), [From::Empty, From::Closed, From::Implicit], Open, ACTIVE, [Empty, Closed, Implicit]),
        ((0, 2), [From::Empty, From::Closed, From::Implicit], Finish, ACTIVE, [Empty, Closed, Implicit]),
        ((2, 3), [From::Closed, From::Implicit, From::Implicit], Write(2), OPEN, [Closed, Implicit, Implicit]),
        ((2, 3), [From::Closed, From::Implicit, From::Implicit], Open, OPEN, [Closed, Implicit, Implicit]),
        ((2, 2), [From::Empty, From::Implicit, From::Implicit], Write(0), ACTIVE, [Empty, Implicit, Implicit]),
        // At the limits, zones that are already open can be written, and change from implicitly to
        // explicitly open.
        ((2, 2), [From::Implicit, From::Implicit, From::Empty], Write(2), OK, [Implicit, Implicit, Empty]),
        ((2, 2), [From::Implicit, From::Implicit, From::Empty], Open, OK, [Explicit, Implicit, Empty]),
        // A change to read-only or offline needs no resource. (In the kernel, such a change of an
        // empty zone closes another zone.)
        ((2, 0), [From::Empty, From::Implicit, From::Implicit], SetReadOnly, OK, [ReadOnly, Implicit, Implicit]),
        ((2, 2), [From::Empty, From::Implicit, From::Implicit], SetOffline, OK, [Offline, Implicit, Implicit]),
    ];
    for make in [memory, bare, deferred] {
        for &((max_open, max_active), from, act, completion, expected) in cases {
            let bench = Bench::new(make(), max_open, max_active);
            let zones = [TARGET, 8, 9];
            for (zone, from) in zones.into_iter().zip(from) {
                bench.prepare(from, zone);
            }
            let given = bench.act(act, TARGET);
            let context = format!("{act:?} with {from:?}, limits {max_open} and {max_active}");
            assert_eq!(given, completion, "{context}");
            assert_eq!(zones.map(|zone| bench.state(zone).0), expected, "{context}");
        }
    }
}

#[test]
fn closing_of_implicitly_open_zones_is_round_robin() {
    let bench = Bench::new(memory(), 3, 0);
    for zone in [4, 9, 15] {
        bench.write(zone, 0, 1).unwrap();
    }
    // Opens a zone by a write, and checks which implicitly open zone is closed to make room.
    let closed = |opened: u64, victim: u64| {
        bench.write(opened, 0, 1).unwrap();
        assert_eq!(bench.state(victim).0, Closed, "opening {opened}");
        assert_eq!(bench.resources().0, 3);
    };
    closed(2, 4);
    closed(10, 9);
    closed(3, 10);
    closed(11, 15);
    // The search wraps to the first sequential zone.
    closed(5, 2);
    closed(6, 3);
    assert_eq!(bench.zones.counts().implicit_closes, 6);
    // Zones 5, 6 and 11 stay open. The next search would start at zone 4.
    assert_eq!([5, 6, 11].map(|zone| bench.state(zone).0), [Implicit; 3]);
}
