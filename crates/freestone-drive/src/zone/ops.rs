//! Zone operations, on the caller's thread: they may wait for the device below.

use std::sync::Arc;

use super::counts::{CLOSES, FINISHES, OPENS, RESETS};
use super::mark::Mark;
use super::queue::{Job, Turn};
use super::states::Guard;
use super::states::{Change, Step};
use super::{Inner, ZoneCondition};
use freestone_core::device::zoned::{Zone, ZoneOp, ZoneType};
use freestone_core::device::{Blocking, Error, Flags, Op, Request, Result};

/// Zones that are reset together, so that their records become durable together.
const RESET_BATCH: usize = 256;

impl Inner {
    /// Does `op` to the zone that starts at `offset`.
    pub fn zone_op(self: &Arc<Self>, op: ZoneOp, offset: u64) -> Result<()> {
        let zone = self.zone_at(offset)?;
        let (outcome, counter) = match op {
            ZoneOp::Open => (self.change(zone, Change::Open), OPENS),
            ZoneOp::Close => (self.change(zone, Change::Close), CLOSES),
            ZoneOp::Finish => (self.finish(zone), FINISHES),
            ZoneOp::Reset => {
                self.own(zone);
                // Counted there.
                return self.reset_owned(&[zone]);
            }
        };
        if outcome.is_ok() {
            self.zone_ops.add(counter, 1);
        }
        outcome
    }

    /// The sequential zone that starts at `offset`, if it can be changed.
    pub fn zone_at(&self, offset: u64) -> Result<u32> {
        let layout = &self.table.layout;
        if offset >= layout.size {
            return Err(Error::OutOfRange);
        }
        let zone = layout.zone_of(offset);
        if layout.start(zone) != offset {
            return Err(Error::Misaligned);
        }
        self.changeable(zone)?;
        Ok(zone)
    }

    fn changeable(&self, zone: u32) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        if self.table.layout.is_sequential(zone) { Ok(()) } else { Err(Error::ZoneCondition) }
    }

    /// Open, close, or the first half of finish: under the zone's lock, when nobody owns the zone.
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
                Step::Go(after) => {
                    guard.publish(after);
                    break Ok(());
                }
                Step::Refused(error) => break Err(error),
                Step::Held(other) => {
                    drop(guard);
                    self.table.wait_for(other);
                }
            }
        };
        if owned {
            self.disown(zone);
        }
        outcome
    }

    /// A finished zone is full after a power cut, too: so all its data and then its record become
    /// durable before the answer.
    fn finish(self: &Arc<Self>, zone: u32) -> Result<()> {
        if self.durable.is_none() {
            return self.change(zone, Change::Finish);
        }
        self.own(zone);
        let outcome = self.zero_tail(zone);
        let outcome = outcome
            .and_then(|()| self.table.change(zone, Change::Finish, |_| Ok(())))
            .and_then(|()| self.sync());
        self.disown(zone);
        outcome
    }

    /// What lies behind the write pointer of a zone that is the caller's own and can be finished:
    /// writes that a crash or a power cut took back, which finishing would bring to light.
    fn zero_tail(&self, zone: u32) -> Result<()> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
        let (layout, word) = (&self.table.layout, self.table.look(zone));
        if !matches!(word.condition(), Empty | ImplicitOpen | ExplicitOpen | Closed) {
            return Ok(());
        }
        let from = word.pointer();
        self.zero_range(layout.start(zone) + from, layout.len(zone) - from)
    }

    /// Waits until the zone is the caller's own. Holds nothing else that others wait for: no lock,
    /// and no other zone with a smaller number than one it waits for.
    pub fn own(&self, zone: u32) {
        let guard = self.table.lock(zone);
        let word = guard.word();
        if !word.is_busy() {
            return guard.publish(word.with_busy(true));
        }
        self.wait_for_turn(zone, guard);
    }

    /// Waits for a zone that is somebody's; then it is the caller's.
    fn wait_for_turn(&self, zone: u32, guard: Guard<'_>) {
        let turn = Arc::new(Turn::default());
        self.queues.push(zone, Job::Thread(Arc::clone(&turn)));
        drop(guard);
        turn.wait();
    }

    /// Makes a zone the caller's own if it is nobody's.
    fn try_own(&self, zone: u32) -> bool {
        let guard = self.table.lock(zone);
        let word = guard.word();
        if word.is_busy() {
            return false;
        }
        guard.publish(word.with_busy(true));
        true
    }

    // ---- reset ----------------------------------------------------------------------------------

    /// Resets every sequential zone that has something to reset. One zone at a time is waited for,
    /// and none is held meanwhile.
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
            if batch.len() == RESET_BATCH || !self.try_own(zone) {
                outcome = outcome.and(self.reset_owned(&batch));
                batch.clear();
                self.own(zone);
            }
            if self.has_data(zone) {
                batch.push(zone);
            } else {
                self.disown(zone);
            }
        }
        outcome.and(self.reset_owned(&batch))
    }

    fn has_data(&self, zone: u32) -> bool {
        let condition = self.table.look(zone).condition();
        !matches!(condition, ZoneCondition::Empty | ZoneCondition::ReadOnly | ZoneCondition::Offline)
    }

    /// Resets zones that are the caller's own, and gives them up.
    fn reset_owned(self: &Arc<Self>, zones: &[u32]) -> Result<()> {
        let can = |zone: &u32| {
            !matches!(self.table.look(*zone).condition(), ZoneCondition::ReadOnly | ZoneCondition::Offline)
        };
        let outcome = if zones.iter().all(can) { self.empty_owned(zones) } else { Err(Error::ZoneCondition) };
        for &zone in zones {
            self.disown(zone);
        }
        if outcome.is_ok() {
            self.zone_ops.add(RESETS, zones.len() as i64);
        }
        outcome
    }

    /// Empties zones that are the caller's own, whatever they are. First their records, durably, so
    /// that what is written later never meets an old write pointer; then the words, so that no
    /// reader takes data that is going away for good; then the data.
    fn empty_owned(&self, zones: &[u32]) -> Result<()> {
        if let Some(durable) = &self.durable {
            let next =
                |&zone: &u32| (zone, self.table.look(zone).next_generation().generation(), Mark::EMPTY);
            durable.force(zones.iter().map(next).collect())?;
        }
        for &zone in zones {
            let guard = self.table.lock(zone);
            let word = guard.word();
            guard.publish(self.table.emptied(zone, word));
        }
        zones.iter().try_for_each(|&zone| self.zero(zone))
    }

    /// The data of a zone becomes zeroes, and its space free.
    pub fn zero(&self, zone: u32) -> Result<()> {
        self.zero_range(self.table.layout.start(zone), self.table.layout.len(zone))
    }

    /// These bytes become zeroes, bad blocks among them: they are no obstacle to a zone operation.
    pub fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        if !self.stores || len == 0 {
            return Ok(());
        }
        let device = self.bad.as_ref().map_or(&self.backing, |bad| bad.below());
        device.run(Request::new(Op::WriteZeroes, offset, len).with(Flags::MAY_FREE))
    }

    // ---- read-only and offline ------------------------------------------------------------------

    /// Puts the zone that holds `offset` into this condition, or empties it where it is in it
    /// already.
    pub fn set_condition(self: &Arc<Self>, offset: u64, condition: ZoneCondition) -> Result<()> {
        if offset >= self.table.layout.size {
            return Err(Error::OutOfRange);
        }
        let zone = self.table.layout.zone_of(offset);
        self.changeable(zone)?;
        self.own(zone);
        let outcome = if self.table.look(zone).condition() == condition {
            self.empty_owned(&[zone])
        } else {
            self.mark_owned(zone, condition)
        };
        self.disown(zone);
        outcome
    }

    fn mark_owned(&self, zone: u32, condition: ZoneCondition) -> Result<()> {
        if let Some(durable) = &self.durable {
            // Its data is kept, and there will be no write pointer to say how much of it was
            // durable.
            self.sync()?;
            let next = self.table.look(zone).next_generation();
            durable.force(vec![(zone, next.generation(), Mark::of(next.with_condition(condition)))])?;
        }
        let guard = self.table.lock(zone);
        let word = guard.word();
        guard.publish(self.table.settle(zone, word, condition).with_pointer(0).next_generation());
        Ok(())
    }

    // ---- report ---------------------------------------------------------------------------------

    /// The rows of the zones from the one that holds `offset` on.
    pub fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let layout = &self.table.layout;
        if offset >= layout.size {
            return Err(Error::OutOfRange);
        }
        for zone in layout.zone_of(offset)..layout.zones {
            let word = self.table.look(zone);
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
