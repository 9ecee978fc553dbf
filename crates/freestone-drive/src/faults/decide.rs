//! Decision which rules fire for a request: a hash of the seed, the rule, the operation, the
//! offset, and the number of times that operation started there.

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

/// Operations whose old content may be kept for stale reads. An append overwrites nothing.
const OVERWRITES: Ops = Ops::WRITES.difference(Ops::APPEND);

/// Properties of a request that rules check. Zone operations and appends have their zone's offset.
#[derive(Debug, Clone, Copy)]
pub struct RequestInfo {
    pub operation: Operation,
    pub offset: u64,
    /// Bytes of data, or to be zeroed or discarded.
    pub len: u64,
    /// Bytes from `offset` on that the request may touch: the zone for appends and zone operations,
    /// else `len`.
    pub reach: u64,
    /// The request has the FUA flag.
    pub durable: bool,
}

/// Faults of one request, by default none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Decision {
    /// Fails the request with this error without doing anything.
    pub fail_before: Option<Error>,
    /// Fails the request with this error after doing it.
    pub fail_after: Option<Error>,
    /// Fault of a write, and its random number.
    pub write_fault: Option<(WriteFault, u64)>,
    /// Skips a flush, or removes the FUA flag.
    pub lie: bool,
    /// Lets a read return old content.
    pub stale: bool,
    /// Random number that chooses the bit to flip.
    pub rot: Option<u64>,
    pub pause: Pause,
}

/// Rules in use, with their counters.
pub struct ActiveRules {
    active: Box<[ActiveRule]>,
    seed: u64,
    tally: Option<Tally>,
    /// Old content for stale reads, if a rule needs it.
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
    /// Creates the counters of `rules`. `block` is the logical block of the device.
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

    /// Returns true if a rule may fire for the request, valid or not, or old content must be kept.
    /// Counts nothing.
    pub fn matches(&self, info: &RequestInfo) -> bool {
        self.keeps_old(info) || self.active.iter().any(|active| active.applicable(info).is_some())
    }

    /// Returns true if the content overwritten by the request must be kept.
    fn keeps_old(&self, info: &RequestInfo) -> bool {
        OVERWRITES.contains(info.operation.set())
            && self.old.as_ref().is_some_and(|old| old.wants(info.offset, info.len))
    }

    /// Counts the request and returns its faults.
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

    /// Counts the request for one rule. Returns the random number of the rule if it fires.
    fn fires(&self, number: u64, active: &ActiveRule, info: &RequestInfo) -> Option<u64> {
        let (rule, operation) = (&active.rule, info.operation as u64);
        // Relaxed: each number is used once; nothing is published with it.
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

    /// Returns each rule with its numbers of matched and fired requests.
    pub fn counts(&self) -> impl Iterator<Item = (&Rule, u64, u64)> {
        self.active.iter().map(|active| {
            // Acquire: pairs with the Release in `try_fire`, so `matched` includes every fired
            // request.
            let fired = active.fired.load(Ordering::Acquire);
            // Relaxed: loaded after `fired`, so the number is never smaller.
            (&active.rule, active.matched.load(Ordering::Relaxed), fired)
        })
    }

    /// Returns how many requests were counted as the first at their offset because the table was
    /// full.
    pub fn uncounted(&self) -> u64 {
        self.tally.as_ref().map_or(0, Tally::uncounted)
    }
}

impl ActiveRule {
    fn new(rule: Rule) -> Self {
        let (ops, threshold) = (rule.ops(), rule.chance.map_or(1 << 64, Chance::threshold));
        Self { rule, ops, threshold, matched: AtomicU64::new(0), fired: AtomicU64::new(0) }
    }

    /// Returns the rule's effects that apply to this request, if any.
    fn applicable(&self, info: &RequestInfo) -> Option<Effects> {
        let RequestInfo { operation, offset, len, reach, durable } = *info;
        let set = operation.set();
        if !self.ops.contains(set) || self.rule.range.is_some_and(|range| !range.overlaps(offset, reach)) {
            return None;
        }
        let mut effects = self.rule.effects;
        effects.write_fault = effects.write_fault.filter(|write_fault| match write_fault {
            // A write within one unit cannot be torn.
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

    /// Uses up one of the rule's `times`. Returns false if none is left.
    fn try_fire(&self) -> bool {
        let most = self.rule.times.unwrap_or(u64::MAX);
        // Release: pairs with the Acquire in `counts`. The word alone decides which requests are
        // within the limit.
        self.fired
            .fetch_update(Ordering::Release, Ordering::Relaxed, |fired| (fired < most).then_some(fired + 1))
            .is_ok()
    }
}

impl Decision {
    /// Adds the effects of another rule: the first one of each kind wins, and the longest pause.
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

/// Hashes a decision. Must stay the same in every version, so that seeds stay valid: XXH3 over the
/// words as little-endian bytes.
pub fn hash(seed: u64, words: [u64; 4]) -> u64 {
    xxh3_64_with_seed(words.map(u64::to_le).as_bytes(), seed)
}
