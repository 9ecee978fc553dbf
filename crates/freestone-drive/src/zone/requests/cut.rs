//! Simulated power cuts of a zoned device, and resets to the state of a new device.

use std::sync::Arc;

use crate::power;
use crate::zone::durable::PendingMark;
use crate::zone::durable::mark::Mark;
use crate::zone::table::word::Word;
use crate::zone::{Inner, ZoneCondition};
use freestone_core::device::{Error, Result};

impl Inner {
    /// Cuts the power. `seed` chooses the new write pointer of each zone between its durable and
    /// its last position. All data before the new write pointer survives. Requests that wait for a
    /// zone fail with [`Error::Gone`].
    pub fn power_cut(self: &Arc<Self>, power: &power::Power, seed: u64) -> Result<power::CutReport> {
        self.with_all_zones(|inner| {
            if let Some(durable) = &inner.durable {
                // Rewrites the suspect part of the state file, since a failed write may have left a
                // write pointer there that exceeds that of the zone.
                durable.commit(Vec::new())?;
            }
            let layout = &inner.table.layout;
            let mut after = Vec::new();
            for zone in layout.conventional..layout.zones {
                let word = inner.table.load(zone);
                let left = inner.word_after_cut(zone, word, seed, power.unit());
                let kept = left.pointer().min(layout.capacity(zone));
                if kept > 0 {
                    power.keep(layout.start(zone), kept)?;
                }
                after.push((zone, left));
            }
            // Data that was not kept may be lost even if the cut failed, so no write pointer may
            // lie after such data.
            let cut = power.cut(seed);
            let recorded = inner.record(&after);
            inner.publish_all(&after);
            recorded.and(cut)
        })
    }

    /// Returns the state word of a zone after a power cut, which does not tear units of `unit`
    /// bytes.
    fn word_after_cut(&self, zone: u32, word: Word, seed: u64, unit: u64) -> Word {
        let layout = &self.table.layout;
        let (durable, present) = match &self.durable {
            Some(durable) => (durable.mark(zone), Mark::of(word)),
            // Without a volatile cache and a state file, every completed write is durable.
            None => (Mark::of(word), Mark::of(word)),
        };
        let next = word.next_generation();
        if durable.is_final() || present.is_final() && word.pointer() != layout.capacity(zone) {
            return next;
        }
        // Number of units between the durable and the last position of the write pointer.
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

    /// Resets all zones to their state in a new device, and all data to zeroes.
    pub fn wipe(self: &Arc<Self>) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        self.with_all_zones(|inner| {
            let layout = &inner.table.layout;
            let fresh = |zone| {
                let word = inner.table.load(zone).next_generation();
                let first = crate::zone::fresh(layout, inner.full_at_first, zone);
                (zone, word.with_condition(first.condition()).with_pointer(first.pointer()))
            };
            let after: Vec<_> = (layout.conventional..layout.zones).map(fresh).collect();
            inner.record(&after)?;
            inner.publish_all(&after);
            inner.zero_range(0, layout.start(layout.conventional))?;
            (layout.conventional..layout.zones).try_for_each(|zone| inner.zero(zone))
        })
    }

    /// Makes the new words `after` of zones that the caller owns durable.
    fn record(&self, after: &[(u32, Word)]) -> Result<()> {
        let note = |&(zone, word): &(u32, Word)| -> PendingMark { (zone, word.generation(), Mark::of(word)) };
        self.durable.as_ref().map_or(Ok(()), |durable| durable.force(after.iter().map(note).collect()))
    }

    /// Publishes the new words `after` of zones that the caller owns.
    fn publish_all(&self, after: &[(u32, Word)]) {
        for &(zone, word) in after {
            let guard = self.table.lock(zone);
            let before = guard.word();
            self.table.settle(zone, before, word.condition());
            guard.publish(word.with_busy(true));
        }
    }

    /// Runs `action` while the caller owns every sequential zone. The lock `all_zones` admits one
    /// caller at a time. No other thread waits for a zone while it owns one, so callers cannot
    /// deadlock.
    fn with_all_zones<T>(self: &Arc<Self>, action: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let _guard = self.all_zones.lock();
        let layout = &self.table.layout;
        for zone in layout.conventional..layout.zones {
            self.take_zone(zone);
        }
        let outcome = action(self);
        for zone in layout.conventional..layout.zones {
            let guard = self.table.lock(zone);
            let waiting = if outcome.is_ok() { self.queues.writes(zone) } else { Vec::new() };
            let word = guard.word();
            self.publish_and_pass(zone, guard, word);
            // Dropping the waiting writes fails them with [`Error::Gone`].
            drop(waiting);
        }
        outcome
    }
}

/// Mixes the bits of a number with the finalizer of splitmix64.
fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}
