//! Checks the contract of devices with zones.

mod appends;
mod limits;

use freestone_core::device::zoned::{Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned};
use freestone_core::device::{self, Device, Error, Op, Request};

use crate::conformance::driver::{Data, Driver, SubmitMode};
use crate::conformance::{CheckResult, DeviceFactory, Options, ensure};

const CHECK: &str = "zoned";

/// Runs the suite for zoned devices: geometry, errors, extents, write pointer rules, conditions,
/// limits, appends.
///
/// A fresh device must have at least two sequential zones, all empty and with a capacity of at
/// least eight blocks.
///
/// # Panics
/// Panics if the contract is violated. The message contains `name`, the seed and the violation.
pub fn check_zoned(name: &str, make: DeviceFactory<'_>, options: Options) {
    if let Err(violation) = run_zoned(make, &options) {
        panic!("{name} violates the contract of zoned devices (seed {:#x}): {violation}", options.seed);
    }
}

/// Runs the suite like [`check_zoned`], but returns the first violation instead of panicking.
pub fn run_zoned(make: DeviceFactory<'_>, options: &Options) -> CheckResult {
    let device = make();
    crate::conformance::check_geometry(&*device)?;
    crate::conformance::check_errors(&*device, options)?;
    crate::conformance::check_extents(&*device, options)?;
    let mut test = ZoneTest::new(&*device, options)?;
    test.report()?;
    test.conventional()?;
    for mode in [SubmitMode::Try, SubmitMode::Submit] {
        test.write_pointer(mode)?;
        test.full(mode)?;
    }
    test.operations()?;
    test.refusals()?;
    if test.geometry.max_append > 0 {
        test.appends()?;
    }
    test.in_order()?;
    drop(device);
    let device = make();
    let mut test = ZoneTest::new(&*device, options)?;
    test.limit_of_open()?;
    test.limit_of_active()?;
    drop(device);
    crate::conformance::check_abandoned(make(), options)
}

struct ZoneTest<'a> {
    driver: Driver<'a>,
    zoned: &'a dyn Zoned,
    geometry: ZoneGeometry,
    block: u64,
    /// Start offsets in bytes of the sequential zones.
    sequential: Vec<u64>,
}

impl<'a> ZoneTest<'a> {
    fn new(device: &'a dyn Device, options: &'a Options) -> CheckResult<Self> {
        let driver = Driver::new(device, options, CHECK, 6);
        let (Some(geometry), Some(zoned)) = (device.geometry().zones, device.zoned()) else {
            return Err(driver.violation("the device has no zones".into()));
        };
        let block = u64::from(device.geometry().logical_block);
        let mut test = Self { driver, zoned, geometry, block, sequential: Vec::new() };
        for zone in test.zones(0)? {
            if zone.kind == ZoneType::SequentialRequired {
                ensure!(zone.capacity >= 8 * block, CHECK, "the suite needs eight blocks a zone: {zone:?}");
                test.sequential.push(zone.start);
            }
        }
        ensure!(test.sequential.len() >= 2, CHECK, "the suite needs two sequential zones");
        Ok(test)
    }

    fn zones(&self, offset: u64) -> CheckResult<Vec<Zone>> {
        let mut rows = Vec::new();
        let answer = self.zoned.report(offset, &mut |zone| {
            rows.push(zone);
            true
        });
        self.ok(answer, "report")?;
        Ok(rows)
    }

    fn zone(&self, start: u64) -> CheckResult<Zone> {
        let mut found = None;
        let answer = self.zoned.report(start, &mut |zone| {
            found = Some(zone);
            false
        });
        self.ok(answer, "report")?;
        found.ok_or_else(|| self.driver.violation(format!("no row for the zone at {start}")))
    }

    fn ok<T>(&self, answer: device::Result<T>, what: &str) -> CheckResult<T> {
        answer.map_err(|error| self.driver.violation(format!("{what} failed: {error}")))
    }

    fn op(&self, op: ZoneOp, start: u64) -> CheckResult {
        self.ok(self.zoned.zone_op(op, start), &format!("{op:?} of the zone at {start}"))
    }

    fn data(&mut self, blocks: u64) -> Vec<u8> {
        let mut data = vec![0; (blocks * self.block) as usize];
        self.driver.rng.fill(&mut data);
        data
    }

    fn write(&mut self, mode: SubmitMode, offset: u64, data: &[u8]) -> CheckResult<device::Result<()>> {
        self.driver.run(mode, Request::write(offset, data.len() as u64), Data::Out(data))
    }

    fn advance(&mut self, start: u64, blocks: u64) -> CheckResult<device::Result<()>> {
        let data = self.data(blocks);
        let at = self.zone(start)?.write_pointer;
        self.write(SubmitMode::Try, at, &data)
    }

    fn is(&self, start: u64, condition: ZoneCondition, pointer: u64, after: &str) -> CheckResult {
        let zone = self.zone(start)?;
        ensure!(
            zone.condition == condition && zone.write_pointer == pointer,
            CHECK,
            "after {after}: {zone:?} should be {condition:?} with the write pointer at {pointer}"
        );
        Ok(())
    }

    fn report(&mut self) -> CheckResult {
        let size = self.driver.device.geometry().size;
        let g = self.geometry;
        ensure!(
            g.zone_size > 0
                && g.zone_size.is_multiple_of(self.block)
                && u64::from(g.nr_zones) == size.div_ceil(g.zone_size)
                && u64::from(g.max_append).is_multiple_of(self.block),
            CHECK,
            "{g:?} does not fit a size of {size} in blocks of {}",
            self.block
        );
        let zones = self.zones(0)?;
        ensure!(zones.len() == g.nr_zones as usize, CHECK, "{} rows of {} zones", zones.len(), g.nr_zones);
        for (i, zone) in zones.iter().enumerate() {
            let start = i as u64 * g.zone_size;
            let len = g.zone_size.min(size - start);
            let sequential = zone.kind == ZoneType::SequentialRequired;
            let (condition, pointer) = if sequential {
                (ZoneCondition::Empty, start)
            } else {
                (ZoneCondition::NotWritePointer, start + len)
            };
            ensure!(
                zone.start == start
                    && zone.len == len
                    && zone.capacity > 0
                    && zone.capacity <= len
                    && zone.capacity.is_multiple_of(self.block)
                    && zone.condition == condition
                    && zone.write_pointer == pointer,
                CHECK,
                "row {i} of a fresh device is {zone:?}"
            );
        }
        // A report from within the second zone must start with that zone.
        let from = g.zone_size + self.block;
        let tail = self.zones(from)?;
        ensure!(
            tail == zones[1..],
            CHECK,
            "a report from byte {from} does not begin with the zone that holds it"
        );
        let mut rows = 0;
        let answer = self.zoned.report(0, &mut |_| {
            rows += 1;
            false
        });
        ensure!(answer == Ok(()) && rows == 1, CHECK, "a report stopped after one row gave {rows}");
        for offset in [size, u64::MAX] {
            let answer = self.zoned.report(offset, &mut |_| true);
            ensure!(answer == Err(Error::OutOfRange), CHECK, "a report from {offset} returned {answer:?}");
        }
        Ok(())
    }

    fn conventional(&mut self) -> CheckResult {
        let Some(zone) = self.zones(0)?.into_iter().find(|zone| zone.kind == ZoneType::Conventional) else {
            return Ok(());
        };
        for mode in SubmitMode::ALL {
            // Write backwards and twice: conventional zones allow any order.
            for at in [4, 2, 2, 0] {
                let data = self.data(2);
                let offset = zone.start + at * self.block;
                self.driver.run_ok(mode, Request::write(offset, data.len() as u64), Data::Out(&data))?;
                self.driver.compare(mode, offset, &data, "a write to a conventional zone")?;
            }
        }
        for op in [ZoneOp::Open, ZoneOp::Close, ZoneOp::Finish, ZoneOp::Reset] {
            let answer = self.zoned.zone_op(op, zone.start);
            ensure!(
                answer == Err(Error::ZoneCondition),
                CHECK,
                "{op:?} of a conventional zone returned {answer:?}"
            );
        }
        let data = self.data(1);
        let answer = self.append(zone.start, &data)?;
        ensure!(
            self.geometry.max_append == 0 || answer == Err(Error::ZoneCondition),
            CHECK,
            "an append to a conventional zone returned {answer:?}"
        );
        self.is(zone.start, ZoneCondition::NotWritePointer, zone.start + zone.len, "all that")
    }

    /// Checks that writes at the write pointer advance it, and that writes elsewhere have no
    /// effect.
    fn write_pointer(&mut self, mode: SubmitMode) -> CheckResult {
        let (start, block) = (self.sequential[0], self.block);
        self.op(ZoneOp::Reset, start)?;
        let zone = self.zone(start)?;
        let data = self.data(3);
        let wrong = |test: &mut Self, offset: u64, blocks: u64, allowed: &[Error]| -> CheckResult {
            let before = test.zone(start)?;
            let noise = test.data(blocks);
            let answer = test.write(mode, offset, &noise)?;
            ensure!(
                answer.is_err_and(|error| allowed.contains(&error)),
                CHECK,
                "a write of {blocks} blocks at {offset} returned {answer:?}, expected one of {allowed:?}; {before:?}"
            );
            ensure!(test.zone(start)? == before, CHECK, "a refused write changed {before:?}");
            Ok(())
        };
        wrong(self, start + block, 1, &[Error::ZoneWritePointer])?;
        let answer = self.write(mode, start, &data)?;
        self.ok(answer, "a write at the write pointer")?;
        self.is(start, ZoneCondition::ImplicitOpen, start + 3 * block, "a write of three blocks")?;
        let pointer = start + 3 * block;
        for offset in [start, pointer - block, pointer + block] {
            wrong(self, offset, 1, &[Error::ZoneWritePointer])?;
        }
        let left = (zone.len - 3 * block) / block;
        if zone.capacity < zone.len {
            wrong(self, pointer, (zone.capacity - 3 * block) / block + 1, &[Error::ZoneWritePointer])?;
        }
        if start + zone.len < self.driver.device.geometry().size {
            wrong(self, pointer, left + 1, &[Error::ZoneBoundary])?;
            let both = [Error::ZoneBoundary, Error::ZoneWritePointer];
            wrong(self, start + zone.len - block, 2, &both)?;
        }
        self.driver.compare(mode, start, &data, "refused writes")?;
        let nothing = vec![self.driver.options.unwritten_byte; block as usize];
        self.driver.compare(mode, pointer, &nothing, "refused writes, behind the write pointer")?;
        self.op(ZoneOp::Reset, start)?;
        self.is(start, ZoneCondition::Empty, start, "a reset")?;
        self.driver.compare(mode, start, &nothing, "a reset")
    }

    /// Checks that a zone which is written to its capacity becomes full.
    fn full(&mut self, mode: SubmitMode) -> CheckResult {
        let start = self.sequential[1];
        self.op(ZoneOp::Reset, start)?;
        let zone = self.zone(start)?;
        let mut all = Vec::new();
        while (all.len() as u64) < zone.capacity {
            let left = (zone.capacity - all.len() as u64) / self.block;
            let blocks = 1 + self.driver.rng.below(left);
            let data = self.data(blocks);
            let answer = self.write(mode, start + all.len() as u64, &data)?;
            self.ok(answer, "a write at the write pointer")?;
            all.extend(data);
        }
        let found = self.zone(start)?;
        ensure!(found.condition == ZoneCondition::Full, CHECK, "written to its capacity: {found:?}");
        for offset in [start, start + zone.capacity - self.block] {
            let data = self.data(1);
            let answer = self.write(mode, offset, &data)?;
            ensure!(
                answer == Err(Error::ZoneCondition),
                CHECK,
                "a write at {offset} to a full zone returned {answer:?}"
            );
        }
        let open = self.zoned.zone_op(ZoneOp::Open, start);
        ensure!(open == Err(Error::ZoneCondition), CHECK, "opening a full zone returned {open:?}");
        self.op(ZoneOp::Finish, start)?;
        self.driver.compare(mode, start, &all, "filling the zone")?;
        self.op(ZoneOp::Reset, start)
    }

    fn operations(&mut self) -> CheckResult {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen};
        let (start, block) = (self.sequential[0], self.block);
        self.op(ZoneOp::Reset, start)?;
        self.op(ZoneOp::Open, start)?;
        self.is(start, ExplicitOpen, start, "open")?;
        self.op(ZoneOp::Close, start)?;
        self.is(start, Empty, start, "close of an open zone without data")?;
        let answer = self.advance(start, 1)?;
        self.ok(answer, "a write")?;
        self.is(start, ImplicitOpen, start + block, "a write")?;
        self.op(ZoneOp::Open, start)?;
        let answer = self.advance(start, 1)?;
        self.ok(answer, "a write")?;
        self.is(start, ExplicitOpen, start + 2 * block, "open and a write")?;
        self.op(ZoneOp::Close, start)?;
        self.is(start, Closed, start + 2 * block, "close")?;
        self.op(ZoneOp::Close, start)?;
        self.is(start, Closed, start + 2 * block, "close twice")?;
        let answer = self.advance(start, 1)?;
        self.ok(answer, "a write to a closed zone")?;
        self.is(start, ImplicitOpen, start + 3 * block, "a write to a closed zone")?;
        let kept = self.driver.read(SubmitMode::Try, start, 3 * block)?;
        self.op(ZoneOp::Finish, start)?;
        let zone = self.zone(start)?;
        ensure!(zone.condition == Full, CHECK, "finish left {zone:?}");
        self.driver.compare(SubmitMode::Submit, start, &kept, "finish")?;
        let other = self.sequential[1];
        let answer = self.advance(other, 2)?;
        self.ok(answer, "a write")?;
        self.ok(self.zoned.reset_all(), "reset of all zones")?;
        for start in self.sequential.clone() {
            self.is(start, Empty, start, "reset of all zones")?;
            let nothing = vec![self.driver.options.unwritten_byte; 3 * block as usize];
            self.driver.compare(SubmitMode::Try, start, &nothing, "reset of all zones")?;
        }
        Ok(())
    }

    fn refusals(&mut self) -> CheckResult {
        let size = self.driver.device.geometry().size;
        let start = self.sequential[0];
        for op in [ZoneOp::Open, ZoneOp::Close, ZoneOp::Finish, ZoneOp::Reset] {
            for offset in [start + self.block, start + 1, u64::MAX] {
                let answer = self.zoned.zone_op(op, offset);
                ensure!(
                    matches!(answer, Err(Error::Misaligned | Error::OutOfRange)),
                    CHECK,
                    "{op:?} at {offset}, where no zone starts, returned {answer:?}"
                );
            }
            let answer = self.zoned.zone_op(op, size.next_multiple_of(self.geometry.zone_size));
            ensure!(answer.is_err(), CHECK, "{op:?} behind the last zone returned {answer:?}");
        }
        if self.geometry.max_append > 0 {
            let data = self.data(1);
            for (offset, len) in
                [(start + self.block, data.len()), (start, 1), (start, 0), (u64::MAX, data.len())]
            {
                let answer = self.append(offset, &data[..len])?;
                ensure!(
                    matches!(answer, Err(Error::Misaligned | Error::OutOfRange)),
                    CHECK,
                    "an append of {len} bytes at {offset} returned {answer:?}"
                );
            }
        }
        self.is(start, ZoneCondition::Empty, start, "operations that were refused")
    }

    /// Checks that writes submitted in sequence, without waiting, start in that order.
    fn in_order(&mut self) -> CheckResult {
        let start = self.sequential[1];
        self.op(ZoneOp::Reset, start)?;
        let data = self.data(8);
        let mut pending = Vec::new();
        for (i, block) in data.chunks(self.block as usize).enumerate() {
            let request = Request::write(start + i as u64 * self.block, self.block);
            pending.push(self.driver.submit(request, self.driver.copy(block)?));
        }
        for pending in pending {
            let answer = self.driver.wait(&pending)?;
            self.ok(answer, "one of several writes submitted in order")?;
        }
        self.driver.compare(SubmitMode::Try, start, &data, "writes submitted in order")?;
        self.driver.run_ok(SubmitMode::Submit, Request::new(Op::Flush, 0, 0), Data::None)
    }
}
