//! Zone operations, which run on the caller's thread and may wait for the device under this layer.

use std::sync::Arc;

use super::queue::{OwnershipWaiter, ZoneWaiter};
use crate::zone::counts::{CLOSES, FINISHES, OPENS, RESETS};
use crate::zone::durable::mark::Mark;
use crate::zone::table::Guard;
use crate::zone::table::{Change, ChangeResult};
use crate::zone::{Inner, ZoneCondition};
use freestone_core::device::zoned::{Zone, ZoneOp, ZoneType};
use freestone_core::device::{Blocking, Error, Flags, Op, Request, Result};

/// Maximum number of zones that are reset together. Their marks then become durable with one sync.
const RESET_BATCH: usize = 256;

impl Inner {
    /// Runs the zone operation `op` on the zone that starts at `offset`.
    pub fn zone_op(self: &Arc<Self>, op: ZoneOp, offset: u64) -> Result<()> {
        let zone = self.zone_at(offset)?;
        let (outcome, counter) = match op {
            ZoneOp::Open => (self.change(zone, Change::Open), OPENS),
            ZoneOp::Close => (self.change(zone, Change::Close), CLOSES),
            ZoneOp::Finish => (self.finish(zone), FINISHES),
            ZoneOp::Reset => {
                self.take_zone(zone);
                // `reset_owned` counts the reset.
                return self.reset_owned(&[zone]);
            }
        };
        if outcome.is_ok() {
            self.zone_ops.add(counter, 1);
        }
        outcome
    }

    /// Returns the number of the sequential zone that starts at `offset`. Fails if there is none,
    /// or the device is read-only.
    pub fn zone_at(&self, offset: u64) -> Result<u32> {
        let layout = &self.table.layout;
        if offset >= layout.size {
            return Err(Error::OutOfRange);
        }
        let zone = layout.zone_of(offset);
        if layout.start(zone) != offset {
            return Err(Error::Misaligned);
        }
        self.check_changeable(zone)?;
        Ok(zone)
    }

    fn check_changeable(&self, zone: u32) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        if self.table.layout.is_sequential(zone) { Ok(()) } else { Err(Error::ZoneCondition) }
    }

    /// Opens, closes or finishes a zone. Waits until no other request or operation owns the zone.
    fn change(self: &Arc<Self>, zone: u32, change: Change) -> Result<()> {
        let mut owned = false;
        let outcome = loop {
            let guard = self.table.lock(zone);
            let word = guard.word();
            if word.is_busy() && !owned {
                self.wait_for_turn(zone, guard);
                owned = true;
                continue;
            }
            match self.table.enter(zone, word, change) {
                ChangeResult::Go(after) => {
                    guard.publish(after);
                    break Ok(());
                }
                ChangeResult::Refused(error) => break Err(error),
                ChangeResult::Locked(other) => {
                    drop(guard);
                    self.table.wait_for(other);
                }
            }
        };
        if owned {
            self.release_zone(zone);
        }
        outcome
    }

    /// Finishes a zone. If the durable state is tracked, first the data and then the mark of the
    /// zone are made durable. A finished zone must be full even after a power cut.
    fn finish(self: &Arc<Self>, zone: u32) -> Result<()> {
        if self.durable.is_none() {
            return self.change(zone, Change::Finish);
        }
        self.take_zone(zone);
        let outcome = self.zero_tail(zone);
        let outcome = outcome
            .and_then(|()| self.table.change(zone, Change::Finish, |_| Ok(())))
            .and_then(|()| self.sync());
        self.release_zone(zone);
        outcome
    }

    /// Zeroes the data beyond the write pointer of a zone that the caller owns. A crash or power
    /// cut may have left data of undone writes there, which finishing the zone would make readable.
    fn zero_tail(&self, zone: u32) -> Result<()> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
        let (layout, word) = (&self.table.layout, self.table.load(zone));
        if !matches!(word.condition(), Empty | ImplicitOpen | ExplicitOpen | Closed) {
            return Ok(());
        }
        let from = word.pointer();
        self.zero_range(layout.start(zone) + from, layout.len(zone) - from)
    }

    /// Waits until the caller owns the zone. The caller must not hold a lock or own another zone.
    /// Only [`with_all_zones`](Self::with_all_zones) owns zones meanwhile, which it takes in
    /// ascending order.
    pub fn take_zone(&self, zone: u32) {
        let guard = self.table.lock(zone);
        let word = guard.word();
        if !word.is_busy() {
            return guard.publish(word.with_busy(true));
        }
        self.wait_for_turn(zone, guard);
    }

    /// Queues the calling thread for a zone that is owned, and waits. Afterwards the caller owns
    /// the zone.
    fn wait_for_turn(&self, zone: u32, guard: Guard<'_>) {
        let waiter = Arc::new(OwnershipWaiter::default());
        self.queues.push(zone, ZoneWaiter::Thread(Arc::clone(&waiter)));
        drop(guard);
        waiter.wait();
    }

    fn try_take_zone(&self, zone: u32) -> bool {
        let guard = self.table.lock(zone);
        let word = guard.word();
        if word.is_busy() {
            return false;
        }
        guard.publish(word.with_busy(true));
        true
    }

    // ---- reset ----------------------------------------------------------------------------------

    /// Resets every sequential zone that is not empty, read-only or offline. Waits for one zone at
    /// a time, and owns no zone while it waits.
    pub fn reset_all(self: &Arc<Self>) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        let layout = &self.table.layout;
        let mut outcome = Ok(());
        let mut batch = Vec::new();
        for zone in layout.conventional..layout.zones {
            if !self.has_data(zone) {
                continue;
            }
            if batch.len() == RESET_BATCH || !self.try_take_zone(zone) {
                outcome = outcome.and(self.reset_owned(&batch));
                batch.clear();
                self.take_zone(zone);
            }
            if self.has_data(zone) {
                batch.push(zone);
            } else {
                self.release_zone(zone);
            }
        }
        outcome.and(self.reset_owned(&batch))
    }

    fn has_data(&self, zone: u32) -> bool {
        let condition = self.table.load(zone).condition();
        !matches!(condition, ZoneCondition::Empty | ZoneCondition::ReadOnly | ZoneCondition::Offline)
    }

    /// Resets zones that the caller owns, and releases them, even after an error.
    fn reset_owned(self: &Arc<Self>, zones: &[u32]) -> Result<()> {
        let can = |zone: &u32| {
            !matches!(self.table.load(*zone).condition(), ZoneCondition::ReadOnly | ZoneCondition::Offline)
        };
        let outcome = if zones.iter().all(can) { self.empty_owned(zones) } else { Err(Error::ZoneCondition) };
        for &zone in zones {
            self.release_zone(zone);
        }
        if outcome.is_ok() {
            self.zone_ops.add(RESETS, zones.len() as i64);
        }
        outcome
    }

    /// Empties zones that the caller owns, in any condition. First the empty marks become durable,
    /// so that new data never has an old write pointer. Then the state words change, so that
    /// readers reject the old data. The data is zeroed last.
    fn empty_owned(&self, zones: &[u32]) -> Result<()> {
        if let Some(durable) = &self.durable {
            let next =
                |&zone: &u32| (zone, self.table.load(zone).next_generation().generation(), Mark::EMPTY);
            durable.force(zones.iter().map(next).collect())?;
        }
        for &zone in zones {
            let guard = self.table.lock(zone);
            let word = guard.word();
            guard.publish(self.table.emptied_word(zone, word));
        }
        zones.iter().try_for_each(|&zone| self.zero(zone))
    }

    /// Zeroes the data of a zone and may free its space.
    pub fn zero(&self, zone: u32) -> Result<()> {
        self.zero_range(self.table.layout.start(zone), self.table.layout.len(zone))
    }

    /// Zeroes a range, including bad blocks, which do not affect zone operations. Does nothing if
    /// the device stores no data.
    pub fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        if !self.stores || len == 0 {
            return Ok(());
        }
        let device = self.bad.as_ref().map_or(&self.backing, |bad| bad.below());
        device.run(Request::new(Op::WriteZeroes, offset, len).with(Flags::MAY_FREE))
    }

    // ---- read-only and offline ------------------------------------------------------------------

    /// Puts the zone that contains byte `offset` into `condition`, or empties the zone if it is
    /// already in this condition.
    pub fn set_condition(self: &Arc<Self>, offset: u64, condition: ZoneCondition) -> Result<()> {
        if offset >= self.table.layout.size {
            return Err(Error::OutOfRange);
        }
        let zone = self.table.layout.zone_of(offset);
        self.check_changeable(zone)?;
        self.take_zone(zone);
        let outcome = if self.table.load(zone).condition() == condition {
            self.empty_owned(&[zone])
        } else {
            self.mark_owned(zone, condition)
        };
        self.release_zone(zone);
        outcome
    }

    fn mark_owned(&self, zone: u32, condition: ZoneCondition) -> Result<()> {
        if let Some(durable) = &self.durable {
            // The zone keeps its data but has no write pointer any more, so all of the data must be
            // durable.
            self.sync()?;
            let next = self.table.load(zone).next_generation();
            durable.force(vec![(zone, next.generation(), Mark::of(next.with_condition(condition)))])?;
        }
        let guard = self.table.lock(zone);
        let word = guard.word();
        guard.publish(self.table.settle(zone, word, condition).with_pointer(0).next_generation());
        Ok(())
    }

    // ---- report ---------------------------------------------------------------------------------

    /// Calls `row` for each zone, from the one that contains byte `offset` on, until `row` returns
    /// false.
    pub fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let layout = &self.table.layout;
        if offset >= layout.size {
            return Err(Error::OutOfRange);
        }
        for zone in layout.zone_of(offset)..layout.zones {
            let word = self.table.load(zone);
            let (start, len, condition) = (layout.start(zone), layout.len(zone), word.condition());
            let sequential = layout.is_sequential(zone);
            let write_pointer = match condition {
                ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly | ZoneCondition::Offline => {
                    start + len
                }
                _ => start + word.pointer(),
            };
            let more = row(Zone {
                start,
                len,
                capacity: if sequential { layout.capacity(zone) } else { len },
                write_pointer,
                kind: if sequential { ZoneType::SequentialRequired } else { ZoneType::Conventional },
                condition,
            });
            if !more {
                break;
            }
        }
        Ok(())
    }
}
