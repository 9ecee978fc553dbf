//! Reduces the lost writes of a failing state to the fewest with which the check still fails, by
//! delta debugging (ddmin): first whole writes, then blocks of the remaining ones.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::Result;
use crate::epoch::Lost;
use crate::report::Verdict;
use crate::run::{Check, Watch, check_twice};
use crate::state::{State, Window};

/// Maximum number of checks to reduce one failure.
const CHECKS_MAX: u64 = 256;

/// Lost version of a block: the write and the block.
pub type LostVersion = (usize, u64);

/// Reduction of the failures at one window.
pub struct Reducer<'a> {
    pub window: Arc<Window>,
    pub check: &'a dyn Check,
    pub watch: &'a dyn Watch,
    /// Failed verdicts by the identity of states; `None` for states that passed.
    known: HashMap<u128, Option<Verdict>>,
    /// Number of checks that ran.
    pub checks: u64,
    /// Number of checks at which the present reduction ends.
    limit: u64,
}

/// A failing choice of lost versions, and its state.
pub struct Reduced {
    pub lost: HashSet<LostVersion>,
    pub state: State,
    /// Verdict of the check, or `None` if the state was not checked again.
    pub verdict: Option<Verdict>,
    pub is_minimal: bool,
}

impl<'a> Reducer<'a> {
    pub fn new(window: Arc<Window>, check: &'a dyn Check, watch: &'a dyn Watch) -> Self {
        Self { window, check, watch, known: HashMap::new(), checks: 0, limit: 0 }
    }

    /// Reduces a choice with which the check fails.
    pub fn reduce(&mut self, lost: &Lost) -> Result<Reduced> {
        self.limit = self.checks + CHECKS_MAX;
        let versions = self.window.epoch.lost_versions(lost);
        let writes = versions.chunk_by(|(write, _), (next, _)| write == next).map(<[_]>::to_vec).collect();
        let writes = self.minimize(writes)?;
        let mut blocks = writes.concat();
        if writes.len() < blocks.len() {
            blocks = self.minimize(blocks.into_iter().map(|version| vec![version]).collect())?.concat();
        }
        // A reduction that ended early has the last choice that failed.
        let is_minimal = !self.is_over();
        let set: HashSet<_> = blocks.into_iter().collect();
        let state = self.window.state(self.choice(&set));
        let verdict = self.known.get(&state.identity()).cloned().flatten();
        Ok(Reduced { lost: set, state, verdict, is_minimal })
    }

    fn is_over(&self) -> bool {
        self.checks >= self.limit || self.watch.should_stop()
    }

    /// Returns a subset of `parts` of which each part is needed for the failure. `parts` fail.
    fn minimize(&mut self, mut parts: Vec<Vec<LostVersion>>) -> Result<Vec<Vec<LostVersion>>> {
        if parts.is_empty() || self.fails(&[])? {
            return Ok(Vec::new());
        }
        let mut pieces = 2;
        while parts.len() > 1 {
            let size = parts.len().div_ceil(pieces);
            let mut smaller = None;
            for (index, piece) in parts.chunks(size).enumerate() {
                // With two pieces, the complement of one is the other.
                if self.fails(piece)? {
                    smaller = Some((piece.to_vec(), 2));
                    break;
                }
                let rest = || parts.chunks(size).enumerate().filter(|(other, _)| *other != index);
                let rest: Vec<_> = rest().flat_map(|(_, piece)| piece.iter().cloned()).collect();
                if pieces > 2 && self.fails(&rest)? {
                    smaller = Some((rest, pieces - 1));
                    break;
                }
            }
            match smaller {
                Some((rest, next)) => (parts, pieces) = (rest, next.max(2)),
                None if size == 1 => break,
                None => pieces = (pieces * 2).min(parts.len()),
            }
        }
        Ok(parts)
    }

    fn choice(&self, lost: &HashSet<LostVersion>) -> Lost {
        self.window.epoch.lose(|write, block| lost.contains(&(write, block)))
    }

    /// Returns true if the check fails with these versions lost. Returns false without a check once
    /// the reduction is over.
    fn fails(&mut self, parts: &[Vec<LostVersion>]) -> Result<bool> {
        let lost = self.choice(&parts.iter().flatten().copied().collect());
        let identity = self.window.identity(&lost);
        if let Some(known) = self.known.get(&identity) {
            return Ok(known.is_some());
        }
        if self.is_over() {
            return Ok(false);
        }
        self.checks += 1;
        let Some(outcome) = check_twice(self.check, 0, &self.window.state(lost))? else {
            self.limit = self.checks;
            return Ok(false);
        };
        let failed = (!outcome.verdict.passed && !outcome.is_flaky).then_some(outcome.verdict);
        let fails = failed.is_some();
        self.known.insert(identity, failed);
        Ok(fails)
    }
}
