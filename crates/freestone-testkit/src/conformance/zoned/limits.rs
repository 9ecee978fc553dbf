//! Limits of open and active zones.

use freestone_core::device::Error;
use freestone_core::device::zoned::{ZoneCondition, ZoneOp};

use super::{CHECK, ZoneTest};
use crate::conformance::{CheckResult, ensure};

impl ZoneTest<'_> {
    pub(super) fn limit_of_open(&mut self) -> CheckResult {
        let max = self.geometry.max_open as usize;
        if max == 0 || self.sequential.len() <= max {
            return Ok(());
        }
        self.ok(self.zoned.reset_all(), "reset of all zones")?;
        let (held, extra) = (self.sequential[..max].to_vec(), self.sequential[max]);
        for &start in &held {
            self.op(ZoneOp::Open, start)?;
        }
        // If the limits of open and active zones are equal, either error is valid.
        let both = self.geometry.max_active == self.geometry.max_open;
        let refused =
            |error: Error| error == Error::ZoneTooManyOpen || (both && error == Error::ZoneTooManyActive);
        let open = self.zoned.zone_op(ZoneOp::Open, extra);
        ensure!(open.is_err_and(refused), CHECK, "open of zone {max} of {max} returned {open:?}");
        let write = self.advance(extra, 1)?;
        ensure!(write.is_err_and(refused), CHECK, "a write that opens one too many returned {write:?}");
        self.is(extra, ZoneCondition::Empty, extra, "operations over the limit of open zones")?;
        // The device closes an implicitly open zone to make room for another one.
        self.op(ZoneOp::Reset, held[0])?;
        let answer = self.advance(held[0], 1)?;
        self.ok(answer, "a write below the limit")?;
        if !both {
            self.op(ZoneOp::Open, extra)?;
            self.is(held[0], ZoneCondition::Closed, held[0] + self.block, "giving way to an open zone")?;
        }
        self.ok(self.zoned.reset_all(), "reset of all zones")
    }

    pub(super) fn limit_of_active(&mut self) -> CheckResult {
        let max = self.geometry.max_active as usize;
        if max == 0 || self.sequential.len() <= max {
            return Ok(());
        }
        self.ok(self.zoned.reset_all(), "reset of all zones")?;
        let (held, extra) = (self.sequential[..max].to_vec(), self.sequential[max]);
        for &start in &held {
            let answer = self.advance(start, 1)?;
            self.ok(answer, "a write below the limit of active zones")?;
            self.op(ZoneOp::Close, start)?;
        }
        let write = self.advance(extra, 1)?;
        ensure!(
            write == Err(Error::ZoneTooManyActive),
            CHECK,
            "a write to one zone more than may be active returned {write:?}"
        );
        let open = self.zoned.zone_op(ZoneOp::Open, extra);
        ensure!(open == Err(Error::ZoneTooManyActive), CHECK, "opening it returned {open:?}");
        self.is(extra, ZoneCondition::Empty, extra, "operations over the limit of active zones")?;
        // Finishing or resetting a zone makes it inactive, so another zone can become active.
        self.op(ZoneOp::Finish, held[0])?;
        let answer = self.advance(extra, 1)?;
        self.ok(answer, "a write after another zone was finished")?;
        self.op(ZoneOp::Reset, extra)?;
        let answer = self.advance(extra, 1)?;
        self.ok(answer, "a write after a reset")?;
        self.ok(self.zoned.reset_all(), "reset of all zones")
    }
}
