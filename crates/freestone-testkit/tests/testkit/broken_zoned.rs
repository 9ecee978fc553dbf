//! Checks that the zoned part of the conformance suite detects violations.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{ModelZoned, ZonedConfig};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    WrongZoneCount,
    WritesAnywhere,
    AppendsOneOff,
    ForgetsAppend,
    StaysOpenWhenFull,
    CloseKeepsOpen,
    ResetKeepsPointer,
    ReportFromNext,
    WrongErrorForFull,
    OpensConventional,
    IgnoresOpenLimit,
    IgnoresActiveLimit,
    OutOfOrder,
}

const CONFIG: ZonedConfig = ZonedConfig {
    zone_size: 128 << 10,
    zone_capacity: 96 << 10,
    nr_zones: 6,
    conventional: 1,
    max_open: 2,
    max_active: 3,
};

struct Broken {
    fault: Fault,
    model: ModelZoned,
    /// A write that is held back so that the next write overtakes it.
    held: std::sync::Mutex<Option<(Request, IoBuf, Completion)>>,
}

impl Broken {
    fn new(fault: Fault) -> Self {
        let config = match fault {
            Fault::IgnoresOpenLimit => ZonedConfig { max_open: 0, ..CONFIG },
            Fault::IgnoresActiveLimit => ZonedConfig { max_active: 0, ..CONFIG },
            _ => CONFIG,
        };
        Self { fault, model: ModelZoned::new(config), held: std::sync::Mutex::default() }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn pointer(&self, offset: u64) -> u64 {
        let mut pointer = 0;
        let _ = self.model.report(offset, &mut |zone| {
            pointer = zone.write_pointer;
            false
        });
        pointer
    }
}

impl Device for Broken {
    fn geometry(&self) -> Geometry {
        let geometry = self.model.geometry();
        let zones = geometry.zones.map(|zones| ZoneGeometry {
            max_open: CONFIG.max_open,
            max_active: CONFIG.max_active,
            nr_zones: zones.nr_zones + u32::from(self.is(Fault::WrongZoneCount)),
            ..zones
        });
        Geometry { zones, ..geometry }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        match self.model.try_io(request, buffer) {
            Err(Error::ZoneWritePointer) if self.is(Fault::WritesAnywhere) => Ok(TryResult::Done),
            Err(Error::ZoneCondition) if self.is(Fault::WrongErrorForFull) => Err(Error::NoSpace),
            answer => answer,
        }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if self.is(Fault::OutOfOrder) && request.op == Op::Write && request.len == 4096 {
            // Every second write overtakes the write before it.
            let mut held = self.held.lock().unwrap();
            match held.take() {
                None if request.offset == self.pointer(request.offset) => {
                    *held = Some((request, buffer, done));
                }
                None => self.model.submit(request, buffer, done),
                Some((first, memory, answer)) => {
                    self.model.submit(request, buffer, done);
                    self.model.submit(first, memory, answer);
                }
            }
            return;
        }
        self.model.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.model.extents(offset, len, row)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        Some(self)
    }
}

impl Zoned for Broken {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let size = self.geometry().size;
        let late =
            self.is(Fault::ReportFromNext) && !offset.is_multiple_of(CONFIG.zone_size) && offset < size;
        let offset = if late { offset.next_multiple_of(CONFIG.zone_size) } else { offset };
        self.model.report(offset, &mut |mut zone| {
            if self.is(Fault::StaysOpenWhenFull) && zone.condition == ZoneCondition::Full {
                zone.condition = ZoneCondition::ImplicitOpen;
            }
            row(zone)
        })
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        match (self.fault, op) {
            (Fault::CloseKeepsOpen, ZoneOp::Close) | (Fault::ResetKeepsPointer, ZoneOp::Reset)
                if offset > 0 =>
            {
                Ok(())
            }
            (Fault::OpensConventional, ZoneOp::Open) if offset == 0 => Ok(()),
            _ => self.model.zone_op(op, offset),
        }
    }

    fn reset_all(&self) -> Result<()> {
        self.model.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let at = self.model.try_append(offset, data, flags)?;
        Ok(at.map(|at| if self.is(Fault::AppendsOneOff) { at + 4096 } else { at }))
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        if self.is(Fault::ForgetsAppend) {
            std::mem::forget(done);
        } else {
            self.model.submit_append(offset, data, flags, done);
        }
    }
}

#[test]
fn each_fault_is_caught() {
    use Fault::*;
    let options =
        Options { window: 256 << 10, rounds: 20, timeout: Duration::from_millis(300), ..Options::default() };
    let run = |fault| conformance::run_zoned(&|| Arc::new(Broken::new(fault)) as Arc<dyn Device>, &options);
    run(None).unwrap();
    for fault in [
        WrongZoneCount,
        WritesAnywhere,
        AppendsOneOff,
        ForgetsAppend,
        StaysOpenWhenFull,
        CloseKeepsOpen,
        ResetKeepsPointer,
        ReportFromNext,
        WrongErrorForFull,
        OpensConventional,
        IgnoresOpenLimit,
        IgnoresActiveLimit,
        OutOfOrder,
    ] {
        match run(fault) {
            Ok(()) => panic!("{fault:?} was not caught"),
            Err(violation) => {
                println!("{fault:?}: {violation}");
                assert_eq!(violation.check, "zoned", "{fault:?} was caught, but so: {violation}");
            }
        }
    }
}
