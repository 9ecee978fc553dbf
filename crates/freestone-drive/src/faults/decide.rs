//! Which rules fire at a request: a hash of the seed, the rule, the operation, the offset and how
//! many times there.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::IntoBytes;

use super::hold::Pause;
use super::rules::{
    Astray, Chance, Effects, LIE_OPS, Operation, Ops, ROT_OPS, Range, Rule, Rules, STALE_OPS,
};
use super::stale::Old;
use super::tally::Tally;
use freestone_core::device::Error;
use freestone_core::sync::{AtomicU64, Ordering};

/// What they change may be kept for stale reads. An append goes where nothing is.
const OVERWRITES: Ops = Ops::WRITES.difference(Ops::APPEND);

/// A request, as far as rules look at it. Zone operations and appends have the zone's offset.
#[derive(Debug, Clone, Copy)]
pub struct Occasion {
    pub operation: Operation,
    pub offset: u64,
    /// Bytes of data, or to be zeroed or discarded.
    pub len: u64,
    /// Bytes from `offset` on that it may touch: its zone for appends and zone operations, else
    /// `len`.
    pub reach: u64,
    /// It has the FUA flag.
    pub durable: bool,
}

/// What happens to a request. By default nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Nothing is done, and this is answered.
    pub refused: Option<Error>,
    /// It is done, in whatever way, and this is answered.
    pub answer: Option<Error>,
    /// How a write strays, and the random word for that.
    pub astray: Option<(Astray, u64)>,
    /// A flush is not done, FUA is taken away.
    pub lie: bool,
    /// A read returns old content.
    pub stale: bool,
    /// The random word that chooses the bit.
    pub rot: Option<u64>,
    pub pause: Pause,
}

/// Rules at work.
pub struct Active {
    live: Box<[Live]>,
    seed: u64,
    tally: Option<Tally>,
    /// Kept for stale reads, where a rule has them.
    pub old: Option<Arc<Old>>,
}

struct Live {
    rule: Rule,
    ops: Ops,
    threshold: u128,
    matched: AtomicU64,
    fired: AtomicU64,
}

impl Active {
    /// `block` is the logical block of the device.
    pub fn new(rules: Rules, seed: u64, block: u32) -> Self {
        let live: Box<[Live]> = rules.0.into_iter().map(Live::new).collect();
        let tally = live.iter().any(|live| live.rule.counts()).then(Tally::default);
        let stale = live.iter().filter(|live| live.rule.effects.stale);
        let ranges: Vec<Range> =
            stale.map(|live| live.rule.range.unwrap_or(Range { offset: 0, len: u64::MAX })).collect();
        let old = (!ranges.is_empty()).then(|| Arc::new(Old::new(ranges, block)));
        Self { live, seed, tally, old }
    }

    /// The operations that are looked at.
    pub fn ops(&self) -> Ops {
        let kept = if self.old.is_some() { OVERWRITES } else { Ops::empty() };
        self.live.iter().fold(kept, |ops, live| ops | live.ops)
    }

    /// Whether something may have to be done about the request, which need not be a possible one.
    /// Counts nothing.
    pub fn meets(&self, occasion: &Occasion) -> bool {
        self.keeps(occasion) || self.live.iter().any(|live| live.applicable(occasion).is_some())
    }

    /// Whether what the request overwrites is to be kept.
    fn keeps(&self, occasion: &Occasion) -> bool {
        OVERWRITES.contains(occasion.operation.set())
            && self.old.as_ref().is_some_and(|old| old.wants(occasion.offset, occasion.len))
    }

    /// Counts the request, and says what happens to it.
    pub fn decide(&self, occasion: &Occasion) -> Verdict {
        let mut verdict = Verdict::default();
        for (number, live) in (0..).zip(&self.live) {
            if let Some(effects) = live.applicable(occasion)
                && let Some(word) = self.fires(number, live, occasion)
            {
                verdict.add(effects, word);
            }
        }
        verdict
    }

    /// The random word of a rule that fires.
    fn fires(&self, number: u64, live: &Live, occasion: &Occasion) -> Option<u64> {
        let (rule, operation) = (&live.rule, occasion.operation as u64);
        // Relaxed: a number that is given out once; nothing is published by it.
        let before = live.matched.fetch_add(1, Ordering::Relaxed);
        let nth = match &self.tally {
            Some(tally) if rule.counts() => {
                let key = [number, operation, occasion.offset];
                tally.count(xxh3_64_with_seed(key.as_bytes(), self.seed))
            }
            _ => 1,
        };
        let word = hash(self.seed, [number, operation, occasion.offset, nth]);
        let fires = before >= rule.after.unwrap_or(0)
            && rule.nth.is_none_or(|wanted| wanted == nth)
            && u128::from(word) < live.threshold
            && live.may_fire();
        fires.then_some(word)
    }

    pub const fn seed(&self) -> u64 {
        self.seed
    }

    pub fn rules(&self) -> Rules {
        Rules(self.live.iter().map(|live| live.rule.clone()).collect())
    }

    /// For each rule how often it could have fired, and how often it did.
    pub fn counts(&self) -> impl Iterator<Item = (&Rule, u64, u64)> {
        self.live.iter().map(|live| {
            // Acquire: pairs with the Release in `may_fire`: what fired has been counted as
            // matching before.
            let fired = live.fired.load(Ordering::Acquire);
            // Relaxed: read after `fired`, so it is never less.
            (&live.rule, live.matched.load(Ordering::Relaxed), fired)
        })
    }

    /// How many requests were taken for the first at their offset because too many offsets are
    /// known.
    pub fn uncounted(&self) -> u64 {
        self.tally.as_ref().map_or(0, Tally::uncounted)
    }
}

impl Live {
    fn new(rule: Rule) -> Self {
        let (ops, threshold) = (rule.ops(), rule.chance.map_or(1 << 64, Chance::threshold));
        Self { rule, ops, threshold, matched: AtomicU64::new(0), fired: AtomicU64::new(0) }
    }

    /// What of the rule's effects this request can have.
    fn applicable(&self, occasion: &Occasion) -> Option<Effects> {
        let Occasion { operation, offset, len, reach, durable } = *occasion;
        let set = operation.set();
        if !self.ops.contains(set) || self.rule.range.is_some_and(|range| !range.meets(offset, reach)) {
            return None;
        }
        let mut effects = self.rule.effects;
        effects.astray = effects.astray.filter(|astray| match astray {
            // One unit arrives or does not: it cannot be torn.
            Astray::Torn(unit) => {
                let unit = u64::from(*unit);
                astray.ops().contains(set)
                    && offset / unit != offset.saturating_add(len.saturating_sub(1)) / unit
            }
            Astray::Lost | Astray::Misdirected => astray.ops().contains(set),
        });
        effects.lie &= LIE_OPS.contains(set) && (durable || operation == Operation::Flush);
        effects.stale &= STALE_OPS.contains(set);
        effects.rot &= ROT_OPS.contains(set);
        (effects != Effects::default()).then_some(effects)
    }

    /// Takes one of the times that are left.
    fn may_fire(&self) -> bool {
        let most = self.rule.times.unwrap_or(u64::MAX);
        // Release: pairs with the Acquire in `counts`. The word decides by itself who is within the
        // limit.
        self.fired
            .fetch_update(Ordering::Release, Ordering::Relaxed, |fired| (fired < most).then_some(fired + 1))
            .is_ok()
    }
}

impl Verdict {
    /// Of what several rules do, the first counts; of pauses the longest.
    fn add(&mut self, effects: Effects, word: u64) {
        let Effects { error, delay, hang, astray, lie, stale, rot } = effects;
        match astray {
            Some(_) => self.answer = self.answer.or(error),
            None => self.refused = self.refused.or(error),
        }
        self.astray = self.astray.or(astray.map(|astray| (astray, hash(word, [1, 0, 0, 0]))));
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

/// Every choice is one of these. What a seed does stays the same from version to version: the words
/// are hashed as little-endian bytes with XXH3.
pub fn hash(seed: u64, words: [u64; 4]) -> u64 {
    xxh3_64_with_seed(words.map(u64::to_le).as_bytes(), seed)
}
