//! Fault injection into zone operations, zone appends, and writes at a write pointer.

use std::sync::Arc;

use super::decide::RequestInfo;
use super::hold::Hold;
use super::rules::{Operation, WriteFault};
use super::{Faults, data};
use freestone_core::device::zoned::{
    AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned,
};
use freestone_core::device::{Device, Flags, IoBuf, Result, forward_zoned};

/// Maximum number of zones that are searched for one with room for a misdirected write.
const ZONES_LOOKED_AT_MAX: usize = 4096;

impl Faults {
    /// Returns the zone geometry, or `None` if no zone starts at `offset`.
    fn zones_at(&self, offset: u64) -> Option<ZoneGeometry> {
        let geometry = self.below.device.geometry();
        geometry.zones.filter(|zones| offset < geometry.size && offset.is_multiple_of(zones.zone_size))
    }

    /// Returns the properties of an append that rules check. Returns `None` if no rule can fire, or
    /// the append is invalid and fails in the device under this layer.
    fn append_info(&self, offset: u64, len: usize, flags: Flags) -> Option<RequestInfo> {
        if !self.watches(Operation::Append) {
            return None;
        }
        let zones = self.zones_at(offset)?;
        let len = len as u64;
        let block = u64::from(self.below.device.geometry().logical_block);
        let is_valid = len > 0 && len.is_multiple_of(block) && len <= u64::from(zones.max_append);
        let durable = flags.contains(Flags::FUA);
        let reach = zones.zone_size;
        is_valid.then_some(RequestInfo { operation: Operation::Append, offset, len, reach, durable })
    }

    /// Runs a zone operation with the injected faults. Blocks the calling thread while a rule
    /// delays or hangs the operation.
    fn blocking(&self, info: &RequestInfo, operate: impl FnOnce() -> Result<()>) -> Result<()> {
        let decision = self.decide(info);
        let outcome = match decision.fail_before {
            Some(error) => Err(error),
            None => operate(),
        };
        self.below.hold.wait(decision.pause)?;
        outcome
    }
}

impl Zoned for Faults {
    forward_zoned!(|faults| faults.below.device => report);

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        let below = self.below.device.zones()?;
        let operation = match op {
            ZoneOp::Open => Operation::Open,
            ZoneOp::Close => Operation::Close,
            ZoneOp::Finish => Operation::Finish,
            ZoneOp::Reset => Operation::Reset,
        };
        match self.zones_at(offset) {
            Some(zones) if self.watches(operation) => {
                let info = RequestInfo { operation, offset, len: 0, reach: zones.zone_size, durable: false };
                self.blocking(&info, || below.zone_op(op, offset))
            }
            _ => below.zone_op(op, offset),
        }
    }

    fn reset_all(&self) -> Result<()> {
        let below = self.below.device.zones()?;
        if !self.watches(Operation::Reset) {
            return below.reset_all();
        }
        let reach = below.geometry().size;
        let info = RequestInfo { operation: Operation::Reset, offset: 0, len: 0, reach, durable: false };
        self.blocking(&info, || below.reset_all())
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        match self.append_info(offset, data.len(), flags) {
            Some(info) if self.matches(&info) => Ok(None),
            _ => self.below.device.zones()?.try_append(offset, data, flags),
        }
    }

    fn submit_append(&self, offset: u64, mut data: IoBuf, mut flags: Flags, done: AppendCompletion) {
        let below = match self.below.device.zones() {
            Ok(below) => below,
            Err(error) => return done(Err(error)),
        };
        let decision = match self.append_info(offset, data.len(), flags) {
            Some(info) => self.decide(&info),
            None => return below.submit_append(offset, data, flags, done),
        };
        let hold = Arc::clone(&self.below.hold);
        if let Some(error) = decision.fail_before {
            return complete_held(&hold, decision.pause, Err(error), done);
        }
        if decision.lie {
            flags.remove(Flags::FUA);
        }
        if let Some(word) = decision.rot {
            data::rot(word, &mut data);
        }
        match decision.write_fault {
            None => {}
            Some((WriteFault::Torn(unit), word)) => {
                data::tear(word, u64::from(unit), offset, &mut data, None);
            }
            Some((WriteFault::Lost, _)) => data.fill(0),
            Some((WriteFault::Misdirected, word)) => {
                append_elsewhere(&*self.below.device, word, offset, &data, flags);
                data.fill(0);
            }
        }
        let done = Box::new(move |outcome: Result<u64>| {
            let outcome = outcome.and_then(|at| decision.fail_after.map_or(Ok(at), Err));
            complete_held(&hold, decision.pause, outcome, done);
        });
        below.submit_append(offset, data, flags, done);
    }
}

/// Completes a zone append with `outcome` after `pause`.
fn complete_held(hold: &Arc<Hold>, pause: super::hold::Pause, outcome: Result<u64>, done: AppendCompletion) {
    hold.complete_after(pause, move |held| done(held.and(outcome)));
}

pub fn is_sequential(device: &dyn Device, offset: u64) -> bool {
    let mut sequential = false;
    if let Some(zoned) = device.zoned() {
        // A zone report fails only if `offset` is beyond the device, and then the request itself
        // fails, too.
        let _ = zoned.report(offset, &mut |zone| {
            sequential = zone.kind == ZoneType::SequentialRequired;
            false
        });
    }
    sequential
}

/// Appends `data`, intended for the zone at `offset`, to a random other zone with room, if one
/// exists. The result of the append is ignored.
pub fn append_elsewhere(device: &dyn Device, word: u64, offset: u64, data: &[u8], flags: Flags) {
    let (Some(geometry), Some(zoned)) = (device.geometry().zones, device.zoned()) else { return };
    if data.len() as u64 > u64::from(geometry.max_append) {
        return;
    }
    let first = word % u64::from(geometry.nr_zones) * geometry.zone_size;
    let mut looked_at = 0;
    let mut found = None;
    for from in [first, 0] {
        // If the report fails, no zone is found, and the data is lost.
        let _ = zoned.report(from, &mut |zone| {
            looked_at += 1;
            if has_room(&zone, offset, data.len() as u64) {
                found = Some(zone.start);
            }
            found.is_none() && looked_at < ZONES_LOOKED_AT_MAX
        });
        if found.is_some() {
            break;
        }
    }
    if let (Some(zone), Ok(copy)) = (found, IoBuf::copy_of(data)) {
        zoned.submit_append(zone, copy, flags, Box::new(|_| {}));
    }
}

fn has_room(zone: &Zone, home: u64, len: u64) -> bool {
    use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
    let is_home = zone.start <= home && home - zone.start < zone.len;
    !is_home
        && zone.kind == ZoneType::SequentialRequired
        && matches!(zone.condition, Empty | ImplicitOpen | ExplicitOpen | Closed)
        && zone.start + zone.capacity - zone.write_pointer >= len
}
