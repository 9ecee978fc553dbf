//! Faults of zones: their operations, appends, and writes at a write pointer that stray.

use std::sync::Arc;

use super::decide::Occasion;
use super::hold::Hold;
use super::rules::{Astray, Operation};
use super::{Faults, data};
use freestone_core::device::zoned::{
    AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned,
};
use freestone_core::device::{Device, Error, Flags, IoBuf, Result};

/// Zones that are looked at for one with room for a write that strays.
const ZONES_LOOKED_AT_MAX: usize = 4096;

impl Faults {
    fn below_zoned(&self) -> Result<&dyn Zoned> {
        self.below.device.zoned().ok_or(Error::Unsupported)
    }

    /// The zones, where one starts at `offset`.
    fn zones_at(&self, offset: u64) -> Option<ZoneGeometry> {
        let geometry = self.below.device.geometry();
        geometry.zones.filter(|zones| offset < geometry.size && offset.is_multiple_of(zones.zone_size))
    }

    /// The append as rules see it, if one may fire at it. What the device below refuses is none of
    /// theirs.
    fn append_occasion(&self, offset: u64, len: usize, flags: Flags) -> Option<Occasion> {
        if !self.watches(Operation::Append) {
            return None;
        }
        let zones = self.zones_at(offset)?;
        let len = len as u64;
        let block = u64::from(self.below.device.geometry().logical_block);
        let is_valid = len > 0 && len.is_multiple_of(block) && len <= u64::from(zones.max_append);
        let durable = flags.contains(Flags::FUA);
        let reach = zones.zone_size;
        is_valid.then_some(Occasion { operation: Operation::Append, offset, len, reach, durable })
    }

    /// Does a zone operation, or not, and lets the calling thread wait.
    fn blocking(&self, occasion: &Occasion, operate: impl FnOnce() -> Result<()>) -> Result<()> {
        let verdict = self.decide(occasion);
        let outcome = match verdict.refused {
            Some(error) => Err(error),
            None => operate(),
        };
        self.below.hold.wait(verdict.pause)?;
        outcome
    }
}

impl Zoned for Faults {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.below_zoned()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        let below = self.below_zoned()?;
        let operation = match op {
            ZoneOp::Open => Operation::Open,
            ZoneOp::Close => Operation::Close,
            ZoneOp::Finish => Operation::Finish,
            ZoneOp::Reset => Operation::Reset,
        };
        match self.zones_at(offset) {
            Some(zones) if self.watches(operation) => {
                let occasion = Occasion { operation, offset, len: 0, reach: zones.zone_size, durable: false };
                self.blocking(&occasion, || below.zone_op(op, offset))
            }
            _ => below.zone_op(op, offset),
        }
    }

    fn reset_all(&self) -> Result<()> {
        let below = self.below_zoned()?;
        if !self.watches(Operation::Reset) {
            return below.reset_all();
        }
        let reach = below.geometry().size;
        let occasion = Occasion { operation: Operation::Reset, offset: 0, len: 0, reach, durable: false };
        self.blocking(&occasion, || below.reset_all())
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        match self.append_occasion(offset, data.len(), flags) {
            Some(occasion) if self.meets(&occasion) => Ok(None),
            _ => self.below_zoned()?.try_append(offset, data, flags),
        }
    }

    fn submit_append(&self, offset: u64, mut data: IoBuf, mut flags: Flags, done: AppendCompletion) {
        let below = match self.below_zoned() {
            Ok(below) => below,
            Err(error) => return done(Err(error)),
        };
        let verdict = match self.append_occasion(offset, data.len(), flags) {
            Some(occasion) => self.decide(&occasion),
            None => return below.submit_append(offset, data, flags, done),
        };
        let hold = Arc::clone(&self.below.hold);
        if let Some(error) = verdict.refused {
            return give(&hold, verdict.pause, Err(error), done);
        }
        if verdict.lie {
            flags.remove(Flags::FUA);
        }
        if let Some(word) = verdict.rot {
            data::rot(word, &mut data);
        }
        match verdict.astray {
            None => {}
            Some((Astray::Torn(unit), word)) => {
                data::tear(word, u64::from(unit), offset, &mut data, None);
            }
            Some((Astray::Lost, _)) => data.fill(0),
            Some((Astray::Misdirected, word)) => {
                append_elsewhere(&*self.below.device, word, offset, &data, flags);
                data.fill(0);
            }
        }
        let done = Box::new(move |outcome: Result<u64>| {
            let outcome = outcome.and_then(|at| verdict.answer.map_or(Ok(at), Err));
            give(&hold, verdict.pause, outcome, done);
        });
        below.submit_append(offset, data, flags, done);
    }
}

/// Answers, when it is time.
fn give(hold: &Arc<Hold>, pause: super::hold::Pause, outcome: Result<u64>, done: AppendCompletion) {
    hold.give(pause, move |held| done(held.and(outcome)));
}

/// Whether the zone that holds `offset` is written at its write pointer only.
pub fn is_sequential(device: &dyn Device, offset: u64) -> bool {
    let mut sequential = false;
    if let Some(zoned) = device.zoned() {
        // A report fails outside of the device only; then the request will too.
        let _ = zoned.report(offset, &mut |zone| {
            sequential = zone.kind == ZoneType::SequentialRequired;
            false
        });
    }
    sequential
}

/// Appends data that was meant for the zone at `offset` to another one which the seed chooses, if
/// one has room; nobody hears what comes of it.
pub fn append_elsewhere(device: &dyn Device, word: u64, offset: u64, data: &[u8], flags: Flags) {
    let (Some(geometry), Some(zoned)) = (device.geometry().zones, device.zoned()) else { return };
    if data.len() as u64 > u64::from(geometry.max_append) {
        return;
    }
    let first = word % u64::from(geometry.nr_zones) * geometry.zone_size;
    let mut looked_at = 0;
    let mut found = None;
    for from in [first, 0] {
        // As in `is_sequential`.
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
