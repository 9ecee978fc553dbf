//! Decides which fault rules fire for a request. The decision is a hash of the seed, the rule, the
//! operation, the offset, and how often that operation started at that offset.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::IntoBytes;

use super::hold::Pause;
use super::rules::{
    Chance, Effects, LIE_OPS, Operation, Ops, ROT_OPS, Range, Rule, Rules, STALE_OPS, WriteFault,
};
use super::stale::OldContent;
use super::tally::Tally;
use freestone_core::device::Error;
use freestone_core::sync::{AtomicU64, Ordering};

/// Operations that overwrite content, which may be kept for stale reads. An append overwrites
/// nothing.
const OVERWRITES: Ops = Ops::WRITES.difference(Ops::APPEND);

/// Properties of a request that fault rules check. For zone operations and appends, `offset` is the
/// start of the zone.
#[derive(Debug, Clone, Copy)]
pub struct RequestInfo {
    pub operation: Operation,
    pub offset: u64,
    /// Number of bytes that the request transfers, zeroes or discards.
    pub len: u64,
    /// Number of bytes from `offset` on that the request may touch: the size of the zone for
    /// appends and zone operations, else `len`.
    pub reach: u64,
    /// True if the request has the FUA flag.
    pub durable: bool,
}

/// Faults to inject into one request. The default injects none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Decision {
    /// Error with which the request fails before it has any effect.
    pub fail_before: Option<Error>,
    /// Error with which the request fails after it was executed.
    pub fail_after: Option<Error>,
    /// Fault of a write, and the random number that selects the torn units or the wrong offset.
    pub write_fault: Option<(WriteFault, u64)>,
    /// True if a flush is skipped, or the FUA flag of a write removed, while success is reported.
    pub lie: bool,
    /// True if a read returns old content instead of the current content.
    pub stale: bool,
    /// Random number that chooses the bit to flip, or `None` to flip no bit.
    pub rot: Option<u64>,
    pub pause: Pause,
}

/// Fault rules in use, with their counters.
pub struct ActiveRules {
    active: Box<[ActiveRule]>,
    seed: u64,
    tally: Option<Tally>,
    /// Overwritten content kept for stale reads, if a rule has the `stale` effect.
    pub old: Option<Arc<OldContent>>,
}

struct ActiveRule {
    rule: Rule,
    ops: Ops,
    threshold: u128,
    matched: AtomicU64,
    fired: AtomicU64,
}

impl ActiveRules {
    /// Activates `rules` with their counters at zero. `block` is the logical block of the device in
    /// bytes.
    pub fn new(rules: Rules, seed: u64, block: u32) -> Self {
        let active: Box<[ActiveRule]> = rules.0.into_iter().map(ActiveRule::new).collect();
        let tally = active.iter().any(|active| active.rule.needs_counts()).then(Tally::default);
        let stale = active.iter().filter(|active| active.rule.effects.stale);
        let ranges: Vec<Range> =
            stale.map(|active| active.rule.range.unwrap_or(Range { offset: 0, len: u64::MAX })).collect();
        let old = (!ranges.is_empty()).then(|| Arc::new(OldContent::new(ranges, block)));
        Self { active, seed, tally, old }
    }

    pub fn ops(&self) -> Ops {
        let kept = if self.old.is_some() { OVERWRITES } else { Ops::empty() };
        self.active.iter().fold(kept, |ops, active| ops | active.ops)
    }

    /// Returns true if a rule may fire for the request, or if the content that it overwrites must
    /// be kept. Changes no counter. The request may be invalid.
    pub fn matches(&self, info: &RequestInfo) -> bool {
        self.keeps_old(info) || self.active.iter().any(|active| active.applicable(info).is_some())
    }

    /// Returns true if the content overwritten by the request must be kept for stale reads.
    fn keeps_old(&self, info: &RequestInfo) -> bool {
        OVERWRITES.contains(info.operation.set())
            && self.old.as_ref().is_some_and(|old| old.wants(info.offset, info.len))
    }

    /// Counts the request for every matching rule and returns the faults to inject.
    pub fn decide(&self, info: &RequestInfo) -> Decision {
        let mut decision = Decision::default();
        for (number, active) in (0..).zip(&self.active) {
            if let Some(effects) = active.applicable(info)
                && let Some(word) = self.fires(number, active, info)
            {
                decision.add(effects, word);
            }
        }
        decision
    }

    /// Counts the request for one rule. Returns the rule's random number for this request, or
    /// `None` if the rule does not fire.
    fn fires(&self, number: u64, active: &ActiveRule, info: &RequestInfo) -> Option<u64> {
        let (rule, operation) = (&active.rule, info.operation as u64);
        // Relaxed: `fetch_add` returns each number once, and no other memory is published with the
        // counter.
        let before = active.matched.fetch_add(1, Ordering::Relaxed);
        let nth = match &self.tally {
            Some(tally) if rule.needs_counts() => {
                let key = [number, operation, info.offset];
                tally.count(xxh3_64_with_seed(key.as_bytes(), self.seed))
            }
            _ => 1,
        };
        let word = hash(self.seed, [number, operation, info.offset, nth]);
        let fires = before >= rule.after.unwrap_or(0)
            && rule.nth.is_none_or(|wanted| wanted == nth)
            && u128::from(word) < active.threshold
            && active.try_fire();
        fires.then_some(word)
    }

    pub const fn seed(&self) -> u64 {
        self.seed
    }

    pub fn rules(&self) -> Rules {
        Rules(self.active.iter().map(|active| active.rule.clone()).collect())
    }

    /// Returns each rule with the number of requests that matched it and the number for which it
    /// fired.
    pub fn counts(&self) -> impl Iterator<Item = (&Rule, u64, u64)> {
        self.active.iter().map(|active| {
            // Acquire: pairs with the Release in `try_fire`, so that `matched` below includes every
            // request counted in `fired`.
            let fired = active.fired.load(Ordering::Acquire);
            // Relaxed: `matched` is loaded after `fired`, so it is never smaller than `fired`.
            (&active.rule, active.matched.load(Ordering::Relaxed), fired)
        })
    }

    /// Returns the number of requests that were treated as the first at their offset because the
    /// table of counters was full.
    pub fn uncounted(&self) -> u64 {
        self.tally.as_ref().map_or(0, Tally::uncounted)
    }
}

impl ActiveRule {
    fn new(rule: Rule) -> Self {
        let (ops, threshold) = (rule.ops(), rule.chance.map_or(1 << 64, Chance::threshold));
        Self { rule, ops, threshold, matched: AtomicU64::new(0), fired: AtomicU64::new(0) }
    }

    /// Returns the effects of the rule that apply to this request, or `None` if none does.
    fn applicable(&self, info: &RequestInfo) -> Option<Effects> {
        let RequestInfo { operation, offset, len, reach, durable } = *info;
        let set = operation.set();
        if !self.ops.contains(set) || self.rule.range.is_some_and(|range| !range.overlaps(offset, reach)) {
            return None;
        }
        let mut effects = self.rule.effects;
        effects.write_fault = effects.write_fault.filter(|write_fault| match write_fault {
            // A write cannot be torn if it lies within one unit.
            WriteFault::Torn(unit) => {
                let unit = u64::from(*unit);
                write_fault.ops().contains(set)
                    && offset / unit != offset.saturating_add(len.saturating_sub(1)) / unit
            }
            WriteFault::Lost | WriteFault::Misdirected => write_fault.ops().contains(set),
        });
        effects.lie &= LIE_OPS.contains(set) && (durable || operation == Operation::Flush);
        effects.stale &= STALE_OPS.contains(set);
        effects.rot &= ROT_OPS.contains(set);
        (effects != Effects::default()).then_some(effects)
    }

    /// Counts one firing of the rule. Returns false if the rule already fired `times` times.
    fn try_fire(&self) -> bool {
        let most = self.rule.times.unwrap_or(u64::MAX);
        // Release: pairs with the Acquire in `counts`. The atomic counter alone decides which
        // requests are within the `times` limit.
        self.fired
            .fetch_update(Ordering::Release, Ordering::Relaxed, |fired| (fired < most).then_some(fired + 1))
            .is_ok()
    }
}

impl Decision {
    /// Adds the effects of another rule that fired. The first effect of each kind and the longest
    /// pause win.
    fn add(&mut self, effects: Effects, word: u64) {
        let Effects { error, delay, hang, write_fault, lie, stale, rot } = effects;
        match write_fault {
            Some(_) => self.fail_after = self.fail_after.or(error),
            None => self.fail_before = self.fail_before.or(error),
        }
        self.write_fault =
            self.write_fault.or(write_fault.map(|write_fault| (write_fault, hash(word, [1, 0, 0, 0]))));
        self.lie |= lie;
        self.stale |= stale;
        self.rot = self.rot.or(rot.then(|| hash(word, [2, 0, 0, 0])));
        if let Some(delay) = delay {
            self.pause = self.pause.and(Pause::of(delay));
        }
        if hang {
            self.pause = Pause::Hang;
        }
    }
}

/// Returns the random number of a decision: XXH3 over `words` as little-endian bytes. The hash must
/// not change between versions, because a seed must reproduce the same faults.
pub fn hash(seed: u64, words: [u64; 4]) -> u64 {
    xxh3_64_with_seed(words.map(u64::to_le).as_bytes(), seed)
}
