//! Power cuts, and the way back to how the device was made.

use std::sync::Arc;

use super::durable::Noted;
use super::mark::Mark;
use super::word::Word;
use super::{Inner, ZoneCondition};
use crate::power;
use freestone_core::device::{Error, Result};

impl Inner {
    /// Cuts the power: every zone's write pointer ends between what was durable and what was
    /// written, as the seed has it, and the data below it stays. What waits for a zone is answered
    /// [`Error::Gone`].
    pub fn power_cut(self: &Arc<Self>, power: &power::Power, seed: u64) -> Result<power::Cut> {
        self.alone(|inner| {
            if let Some(durable) = &inner.durable {
                // No write pointer may end below one that a failed write left in the state file.
                durable.commit(Vec::new())?;
            }
            let layout = &inner.table.layout;
            let mut after = Vec::new();
            for zone in layout.conventional..layout.zones {
                let word = inner.table.look(zone);
                let left = inner.left_by_cut(zone, word, seed, power.unit());
                let kept = left.pointer().min(layout.capacity(zone));
                if kept > 0 {
                    power.keep(layout.start(zone), kept)?;
                }
                after.push((zone, left));
            }
            // What was not kept is gone, also where the cut met an error: no write pointer may stay
            // above it.
            let cut = power.cut(seed);
            let recorded = inner.record(&after);
            inner.become_all(&after);
            recorded.and(cut)
        })
    }

    /// A zone after the cut, which tears no unit of `unit` bytes.
    fn left_by_cut(&self, zone: u32, word: Word, seed: u64, unit: u64) -> Word {
        let layout = &self.table.layout;
        let (durable, present) = match &self.durable {
            Some(durable) => (durable.mark(zone), Mark::of(word)),
            // Nothing below has a volatile cache.
            None => (Mark::of(word), Mark::of(word)),
        };
        let next = word.next_generation();
        if durable.is_final() || present.is_final() && word.pointer() != layout.capacity(zone) {
            return next;
        }
        // The units that the unflushed bytes reach into.
        let start = layout.start(zone);
        let first = (start + durable.pointer()) / unit;
        let units = match word.pointer() {
            pointer if pointer > durable.pointer() => (start + pointer).div_ceil(unit) - first,
            _ => 0,
        };
        let pointer = match mix(seed ^ mix(u64::from(zone))) % (units + 1) {
            0 => durable.pointer(),
            kept => ((first + kept) * unit - start).min(word.pointer()),
        };
        let condition = match pointer {
            0 => ZoneCondition::Empty,
            _ if pointer == layout.capacity(zone) => ZoneCondition::Full,
            _ => ZoneCondition::Closed,
        };
        next.with_condition(condition).with_pointer(pointer)
    }

    /// All zones as when the device was made, and all data gone.
    pub fn wipe(self: &Arc<Self>) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        self.alone(|inner| {
            let layout = &inner.table.layout;
            let fresh = |zone| {
                let word = inner.table.look(zone).next_generation();
                let first = super::fresh(layout, inner.full_at_first, zone);
                (zone, word.with_condition(first.condition()).with_pointer(first.pointer()))
            };
            let after: Vec<_> = (layout.conventional..layout.zones).map(fresh).collect();
            inner.record(&after)?;
            inner.become_all(&after);
            inner.zero_range(0, layout.start(layout.conventional))?;
            (layout.conventional..layout.zones).try_for_each(|zone| inner.zero(zone))
        })
    }

    /// Makes durable that zones that are the caller's own will be these.
    fn record(&self, after: &[(u32, Word)]) -> Result<()> {
        let note = |&(zone, word): &(u32, Word)| -> Noted { (zone, word.generation(), Mark::of(word)) };
        self.durable.as_ref().map_or(Ok(()), |durable| durable.force(after.iter().map(note).collect()))
    }

    /// Zones that are the caller's own become these.
    fn become_all(&self, after: &[(u32, Word)]) {
        for &(zone, word) in after {
            let guard = self.table.lock(zone);
            let before = guard.word();
            self.table.settle(zone, before, word.condition());
            guard.publish(word.with_busy(true));
        }
    }

    /// Has every sequential zone for its own while `action` is done. Only one at a time: it waits
    /// for zones in ascending order while it owns others, which nobody else does.
    fn alone<T>(self: &Arc<Self>, action: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let _one = self.whole.lock();
        let layout = &self.table.layout;
        for zone in layout.conventional..layout.zones {
            self.own(zone);
        }
        let outcome = action(self);
        for zone in layout.conventional..layout.zones {
            let guard = self.table.lock(zone);
            let waiting = if outcome.is_ok() { self.queues.writes(zone) } else { Vec::new() };
            let word = guard.word();
            self.pass_on(zone, guard, word);
            // Each is answered "gone" by being dropped.
            drop(waiting);
        }
        outcome
    }
}

/// Spreads the bits of a number (the finalizer of splitmix64).
fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}
