//! What a rule says: on which operations, what happens, where and when. Its text is
//! [`text`](super::text)'s.

use std::fmt;
use std::time::Duration;

use bitflags::bitflags;

use freestone_core::device::Error;

/// Most rules at once: every request is held against each.
pub const RULES_MAX: usize = 64;
/// Longest delay.
pub const DELAY_SECONDS_MAX: u64 = 3600;
/// Largest `nth`: as far as the times at an offset are counted.
pub const NTH_MAX: u64 = super::tally::COUNT_MAX - 1;

/// What can be made to fail: the operations of a device and of its zones.
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

        /// They bring data.
        const DATA = Self::WRITE.bits() | Self::APPEND.bits();
        /// They change what is read afterwards.
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

    /// The set of this one.
    pub const fn set(self) -> Ops {
        Ops::from_bits_truncate(1 << self as u32)
    }
}

/// The word that a rule begins with.
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

/// A write that does not arrive as it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Astray {
    /// Some units of this many bytes arrive.
    Torn(u32),
    /// Nothing arrives.
    Lost,
    /// It arrives elsewhere.
    Misdirected,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent effects, each with a name")]
pub(super) struct Effects {
    pub error: Option<Error>,
    pub delay: Option<Duration>,
    pub hang: bool,
    pub astray: Option<Astray>,
    pub lie: bool,
    pub stale: bool,
    pub rot: bool,
}

impl Effects {
    /// The operations that at least one of the effects can be had by.
    pub fn ops(&self) -> Ops {
        let mut ops = Ops::empty();
        if self.error.is_some() || self.delay.is_some() || self.hang {
            ops = Ops::all();
        }
        if let Some(astray) = self.astray {
            ops |= astray.ops();
        }
        for (given, of) in [(self.lie, LIE_OPS), (self.stale, STALE_OPS), (self.rot, ROT_OPS)] {
            if given {
                ops |= of;
            }
        }
        ops
    }

    /// Whether the seed chooses more than whether the rule fires.
    pub const fn are_chosen(&self) -> bool {
        matches!(self.astray, Some(Astray::Torn(_) | Astray::Misdirected)) || self.rot
    }
}

impl Astray {
    pub const fn ops(self) -> Ops {
        match self {
            Self::Torn(_) | Self::Misdirected => Ops::DATA,
            Self::Lost => Ops::WRITES,
        }
    }
}

/// A flush is not done; of what is written, the FUA flag goes missing.
pub(super) const LIE_OPS: Ops = Ops::WRITES.union(Ops::FLUSH);
pub(super) const STALE_OPS: Ops = Ops::READ;
pub(super) const ROT_OPS: Ops = Ops::DATA.union(Ops::READ);

/// A probability as a reduced fraction, above 0, at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chance {
    pub count: u64,
    pub of: u64,
}

impl Chance {
    /// `None` where it is not above 0 and at most 1.
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

    /// A random 64-bit word below this comes with the probability.
    pub fn threshold(self) -> u128 {
        (u128::from(self.count) << 64) / u128::from(self.of)
    }
}

/// A place: bytes from `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub offset: u64,
    pub len: u64,
}

impl Range {
    /// Whether `[offset, offset + len)` and this have a byte in common.
    pub const fn meets(self, offset: u64, len: u64) -> bool {
        offset < self.offset.saturating_add(self.len) && self.offset < offset.saturating_add(len)
    }
}

/// One rule. It is made from text and written as text: see [the module](super).
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
    /// The operations that the rule can fire at.
    pub(super) fn ops(&self) -> Ops {
        let ops = self.target.ops() & self.effects.ops();
        // A flush has no place.
        if self.range.is_some() { ops - Ops::FLUSH } else { ops }
    }

    /// Whether it depends on how many times something was done at an offset.
    pub(super) const fn counts(&self) -> bool {
        self.nth.is_some() || self.chance.is_some() || self.effects.are_chosen()
    }
}

/// Rules in the order in which they are asked; perhaps none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(pub(super) Vec<Rule>);

impl Rules {
    /// No rule: nothing is injected.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Whether there is no rule.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rules, in order.
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

/// The text from which the same rules are read.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, rule) in self.0.iter().enumerate() {
            write!(f, "{}{rule}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
