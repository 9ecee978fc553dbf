//! Rules: operations, effects and conditions. [`text`](super::text) parses and formats them.

use std::fmt;
use std::time::Duration;

use bitflags::bitflags;

use freestone_core::device::Error;

/// Maximum number of rules; every request is checked against each.
pub const RULES_MAX: usize = 64;
/// Longest delay in seconds.
pub const DELAY_SECONDS_MAX: u64 = 3600;
/// Largest `nth`: the limit of the counters per offset.
pub const NTH_MAX: u64 = super::tally::COUNT_MAX - 1;

/// Operations of a device and its zones that can fail.
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
    /// A set of [`Operation`]s.
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

        /// Operations that carry data.
        const DATA = Self::WRITE.bits() | Self::APPEND.bits();
        /// Operations that change later reads.
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

    /// Returns the set with this operation only.
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
    /// Only some units of this many bytes are written.
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
    /// Returns the operations to which at least one of the effects applies.
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

    /// Returns true if the effects themselves need random numbers.
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

/// Operations of `lie`: a flush is skipped, a write loses its FUA flag.
pub(super) const LIE_OPS: Ops = Ops::WRITES.union(Ops::FLUSH);
pub(super) const STALE_OPS: Ops = Ops::READ;
pub(super) const ROT_OPS: Ops = Ops::DATA.union(Ops::READ);

/// Probability as a reduced fraction, above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chance {
    pub count: u64,
    pub of: u64,
}

impl Chance {
    /// Returns `None` unless the fraction is above 0 and at most 1.
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

    /// Returns the limit below which a random 64-bit number falls with this probability.
    pub fn threshold(self) -> u128 {
        (u128::from(self.count) << 64) / u128::from(self.of)
    }
}

/// Range of bytes.
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

/// Fault rule. For its text see the [module](super).
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
    /// Returns the operations for which the rule can fire.
    pub(super) fn ops(&self) -> Ops {
        let ops = self.target.ops() & self.effects.ops();
        // A flush has no offset.
        if self.range.is_some() { ops - Ops::FLUSH } else { ops }
    }

    /// Returns true if the rule depends on the number of operations at an offset.
    pub(super) const fn needs_counts(&self) -> bool {
        self.nth.is_some() || self.chance.is_some() || self.effects.are_random()
    }
}

/// List of rules, in the order of evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(pub(super) Vec<Rule>);

impl Rules {
    /// Returns an empty list, which injects nothing.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns true if there is no rule.
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

/// Formats the rules so that parsing returns the same rules.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, rule) in self.0.iter().enumerate() {
            write!(f, "{}{rule}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
