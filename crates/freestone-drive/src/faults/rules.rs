//! Fault rules: operations, effects and conditions. [`text`](super::text) parses and formats rules.

use std::fmt;
use std::time::Duration;

use bitflags::bitflags;

use freestone_core::device::Error;

/// Maximum number of rules of a device. Limited because every request is checked against every
/// rule.
pub const RULES_MAX: usize = 64;
/// Longest delay of a rule in seconds.
pub const DELAY_SECONDS_MAX: u64 = 3600;
/// Largest value of `nth`. The counters per offset stop at the next number.
pub const NTH_MAX: u64 = super::tally::COUNT_MAX - 1;

/// Operations of a device and its zones into which faults can be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Operation {
    Read,
    Write,
    Discard,
    Zeroes,
    Flush,
    Append,
    Open,
    Close,
    Finish,
    Reset,
}

bitflags! {
    /// Set of [`Operation`]s.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(super) struct Ops: u32 {
        const READ = 1;
        const WRITE = 1 << 1;
        const DISCARD = 1 << 2;
        const ZEROES = 1 << 3;
        const FLUSH = 1 << 4;
        const APPEND = 1 << 5;
        const OPEN = 1 << 6;
        const CLOSE = 1 << 7;
        const FINISH = 1 << 8;
        const RESET = 1 << 9;

        /// Operations that carry data to the device.
        const DATA = Self::WRITE.bits() | Self::APPEND.bits();
        /// Operations that change the content of the device.
        const WRITES = Self::DATA.bits() | Self::ZEROES.bits() | Self::DISCARD.bits();
    }
}

impl Operation {
    pub const ALL: [Self; 10] = [
        Self::Read,
        Self::Write,
        Self::Discard,
        Self::Zeroes,
        Self::Flush,
        Self::Append,
        Self::Open,
        Self::Close,
        Self::Finish,
        Self::Reset,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Discard => "discard",
            Self::Zeroes => "zeroes",
            Self::Flush => "flush",
            Self::Append => "append",
            Self::Open => "open",
            Self::Close => "close",
            Self::Finish => "finish",
            Self::Reset => "reset",
        }
    }

    /// Returns the set that contains only this operation.
    pub const fn set(self) -> Ops {
        Ops::from_bits_truncate(1 << self as u32)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    One(Operation),
    Writes,
    All,
}

impl Target {
    pub const fn ops(self) -> Ops {
        match self {
            Self::One(operation) => operation.set(),
            Self::Writes => Ops::WRITES,
            Self::All => Ops::all(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteFault {
    /// Only some of the write's units are written. The number is the size of a unit in bytes.
    Torn(u32),
    Lost,
    Misdirected,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent effects, each with a name")]
pub(super) struct Effects {
    pub error: Option<Error>,
    pub delay: Option<Duration>,
    pub hang: bool,
    pub write_fault: Option<WriteFault>,
    pub lie: bool,
    pub stale: bool,
    pub rot: bool,
}

impl Effects {
    /// Returns the set of operations to which at least one of the effects applies.
    pub fn ops(&self) -> Ops {
        let mut ops = Ops::empty();
        if self.error.is_some() || self.delay.is_some() || self.hang {
            ops = Ops::all();
        }
        if let Some(write_fault) = self.write_fault {
            ops |= write_fault.ops();
        }
        for (given, of) in [(self.lie, LIE_OPS), (self.stale, STALE_OPS), (self.rot, ROT_OPS)] {
            if given {
                ops |= of;
            }
        }
        ops
    }

    /// Returns true if an effect needs a random number: torn units, a wrong offset, or a flipped
    /// bit.
    pub const fn are_random(&self) -> bool {
        matches!(self.write_fault, Some(WriteFault::Torn(_) | WriteFault::Misdirected)) || self.rot
    }
}

impl WriteFault {
    pub const fn ops(self) -> Ops {
        match self {
            Self::Torn(_) | Self::Misdirected => Ops::DATA,
            Self::Lost => Ops::WRITES,
        }
    }
}

/// Operations to which `lie` applies: a flush is skipped, and a write loses its FUA flag.
pub(super) const LIE_OPS: Ops = Ops::WRITES.union(Ops::FLUSH);
pub(super) const STALE_OPS: Ops = Ops::READ;
pub(super) const ROT_OPS: Ops = Ops::DATA.union(Ops::READ);

/// Probability `count / of` as a reduced fraction, above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chance {
    pub count: u64,
    pub of: u64,
}

impl Chance {
    /// Returns the probability `count / of`, or `None` unless it is above 0 and at most 1.
    pub fn new(count: u64, of: u64) -> Option<Self> {
        if count == 0 || count > of {
            return None;
        }
        let (mut a, mut b) = (of, count);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Some(Self { count: count / a, of: of / a })
    }

    /// Returns the limit such that a random 64-bit number is less than it with this probability.
    pub fn threshold(self) -> u128 {
        (u128::from(self.count) << 64) / u128::from(self.of)
    }
}

/// Range of bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub offset: u64,
    pub len: u64,
}

impl Range {
    /// Returns true if `[offset, offset + len)` and this range overlap.
    pub const fn overlaps(self, offset: u64, len: u64) -> bool {
        offset < self.offset.saturating_add(self.len) && self.offset < offset.saturating_add(len)
    }
}

/// Fault rule. The [module](super) describes its text format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub(super) target: Target,
    pub(super) effects: Effects,
    pub(super) range: Option<Range>,
    pub(super) chance: Option<Chance>,
    pub(super) nth: Option<u64>,
    pub(super) times: Option<u64>,
    pub(super) after: Option<u64>,
}

impl Rule {
    /// Returns the set of operations for which the rule can fire.
    pub(super) fn ops(&self) -> Ops {
        let ops = self.target.ops() & self.effects.ops();
        // A flush has no offset, so a rule with a range never matches it.
        if self.range.is_some() { ops - Ops::FLUSH } else { ops }
    }

    /// Returns true if the rule depends on how often an operation started at an offset.
    pub(super) const fn needs_counts(&self) -> bool {
        self.nth.is_some() || self.chance.is_some() || self.effects.are_random()
    }
}

/// List of fault rules, in the order of evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(pub(super) Vec<Rule>);

impl Rules {
    /// Returns an empty list, which injects no faults.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns true if the list contains no rules.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the rules in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Rule> {
        self.0.iter()
    }
}

impl<'a> IntoIterator for &'a Rules {
    type Item = &'a Rule;
    type IntoIter = std::slice::Iter<'a, Rule>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Formats the rules separated by `; `, so that parsing returns the same rules.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, rule) in self.0.iter().enumerate() {
            write!(f, "{}{rule}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
