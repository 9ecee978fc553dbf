//! Kinds of operations that are counted separately.

use std::ops::{Index, IndexMut};

use crate::device::Op;

/// A kind of operation with its own counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counter {
    /// Read requests.
    Read,
    /// Write requests, without zone appends.
    Write,
    /// Discard requests.
    Discard,
    /// Write zeroes requests.
    WriteZeroes,
    /// Flush requests.
    Flush,
    /// Zone appends.
    Append,
}

impl Counter {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Discard, Self::WriteZeroes, Self::Flush, Self::Append];

    /// Returns the name used in statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
            Self::Flush => "flush",
            Self::Append => "append",
        }
    }
}

impl From<Op> for Counter {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write => Self::Write,
            Op::Discard => Self::Discard,
            Op::WriteZeroes => Self::WriteZeroes,
            Op::Flush => Self::Flush,
        }
    }
}

/// An array with one element for each [`Counter`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PerCounter<T>([T; Counter::ALL.len()]);

impl<T> Index<Counter> for PerCounter<T> {
    type Output = T;
    fn index(&self, counter: Counter) -> &T {
        &self.0[counter as usize]
    }
}

impl<T> IndexMut<Counter> for PerCounter<T> {
    fn index_mut(&mut self, counter: Counter) -> &mut T {
        &mut self.0[counter as usize]
    }
}
