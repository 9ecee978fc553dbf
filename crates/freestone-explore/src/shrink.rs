//! Reduces the lost writes of a failing state to the fewest with which the check still fails, by
//! delta debugging (ddmin): first whole writes, then blocks of the remaining ones.
//!
//! Choices are checked in parallel, ahead of the order in which ddmin tries them. The first choice
//! in that order that fails is taken, so the result does not depend on the number of jobs.

use std::collections::{HashMap, HashSet};
use std::iter::{once, successors};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::epoch::Lost;
use crate::report::Verdict;
use crate::run::{Check, Outcome, Watch, check_until_failure};
use crate::state::{State, Window};

/// Maximum number of checks to reduce one failure, without those ahead that were not needed.
const CHECKS_MAX: u64 = 256;
/// Maximum number of results that are kept for later, because they were not needed yet.
const AHEAD_MAX: usize = 256;

/// Lost version of a block: the write and the block.
pub type LostVersion = (usize, u64);

/// Lost versions that ddmin loses or keeps together.
type Part = Vec<LostVersion>;

/// Reduction of the failures at one window.
pub struct Reducer<'a> {
    pub window: Arc<Window>,
    pub check: &'a dyn Check,
    pub watch: &'a dyn Watch,
    /// Number of checks at the same time.
    pub jobs: NonZeroUsize,
    /// Failed verdicts by the identity of states; `None` for states that passed.
    known: HashMap<u128, Option<Verdict>>,
    /// Results of checks that ran before their turn.
    ahead: HashMap<u128, Option<Verdict>>,
    /// Number of checks whose result was used.
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

/// Choice of parts that may suffice for the failure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    /// A range of the parts.
    range: Range<usize>,
    /// True if all other parts are lost, false if those of the range are.
    is_rest: bool,
    /// Number of pieces into which the lost parts are divided next, if the candidate fails.
    pieces: usize,
}

impl<'a> Reducer<'a> {
    pub fn new(window: Arc<Window>, check: &'a dyn Check, watch: &'a dyn Watch, jobs: NonZeroUsize) -> Self {
        let (known, ahead) = (HashMap::new(), HashMap::new());
        Self { window, check, watch, jobs, known, ahead, checks: 0, limit: 0 }
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
        let state = self.window.state(self.choice(set.iter()));
        let verdict = self.known.get(&state.identity()).cloned().flatten();
        Ok(Reduced { lost: set, state, verdict, is_minimal })
    }

    fn is_over(&self) -> bool {
        self.checks >= self.limit || self.watch.should_stop()
    }

    /// Returns a subset of `parts` of which each part is needed for the failure. `parts` fail.
    fn minimize(&mut self, mut parts: Vec<Part>) -> Result<Vec<Part>> {
        if parts.is_empty() {
            return Ok(parts);
        }
        let mut next =
            self.first_failing(&parts, once(Candidate::NOTHING).chain(candidates(parts.len(), 2)))?;
        while let Some(failing) = next {
            parts = failing.lost(&parts).cloned().collect();
            next = self.first_failing(&parts, candidates(parts.len(), failing.pieces))?;
        }
        Ok(parts)
    }

    fn choice<'v>(&self, lost: impl Iterator<Item = &'v LostVersion>) -> Lost {
        let lost: HashSet<_> = lost.collect();
        self.window.epoch.lose(|write, block| lost.contains(&(write, block)))
    }

    /// Returns the first of the candidates with which the check fails, or `None` if none does or the
    /// reduction is over.
    fn first_failing(
        &mut self,
        parts: &[Part],
        candidates: impl Iterator<Item = Candidate> + Clone + Send,
    ) -> Result<Option<Candidate>> {
        let identities = self.check_ahead(parts, candidates.clone())?;
        for (candidate, identity) in candidates.zip(identities) {
            if !self.known.contains_key(&identity) {
                if self.is_over() {
                    return Ok(None);
                }
                self.checks += 1;
                let Some(verdict) = self.ahead.remove(&identity) else {
                    // The check was stopped.
                    self.limit = self.checks;
                    return Ok(None);
                };
                self.known.insert(identity, verdict);
            }
            if self.known[&identity].is_some() {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    /// Checks candidates in order until one fails, or the reduction may check no more. Adds the results
    /// to `ahead`. Returns the identities of the candidates up to there.
    fn check_ahead(
        &mut self,
        parts: &[Part],
        mut candidates: impl Iterator<Item = Candidate> + Send,
    ) -> Result<Vec<u128>> {
        if self.ahead.len() > AHEAD_MAX {
            self.ahead.clear();
        }
        let (known, ahead) = (&self.known, &self.ahead);
        let mut identities = Vec::new();
        let mut left = self.limit.saturating_sub(self.checks);
        let mut seen = HashSet::new();
        let next = || {
            while left > 0 {
                let lost = self.choice(candidates.next()?.lost(parts).flatten());
                let identity = self.window.identity(&lost);
                identities.push(identity);
                let is_new = !known.contains_key(&identity) && seen.insert(identity);
                left -= u64::from(is_new);
                match known.get(&identity).or_else(|| ahead.get(&identity)) {
                    // The candidates after one that fails are not needed.
                    Some(Some(_)) => left = 0,
                    None if is_new => return Some(self.window.state(lost)),
                    Some(None) | None => {}
                }
            }
            None
        };
        let outcomes = check_until_failure(self.check, self.jobs, self.watch, next)?;
        for (identity, Outcome { verdict, is_flaky }) in outcomes {
            self.ahead.insert(identity, (!verdict.passed && !is_flaky).then_some(verdict));
        }
        Ok(identities)
    }
}

impl Candidate {
    /// The choice in which nothing is lost.
    const NOTHING: Self = Self { range: 0..0, is_rest: false, pieces: 2 };

    /// Returns the parts that are lost.
    fn lost<'p>(&self, parts: &'p [Part]) -> impl Iterator<Item = &'p Part> + use<'p> {
        let Self { range, is_rest, .. } = self.clone();
        let lost = parts.iter().enumerate().filter(move |(index, _)| range.contains(index) != is_rest);
        lost.map(|(_, part)| part)
    }
}

/// Returns the candidates for `parts` failing parts, in the order of ddmin: each of `pieces` pieces and
/// the rest without it, then with twice as many pieces, until each piece is one part.
fn candidates(parts: usize, pieces: usize) -> impl Iterator<Item = Candidate> + Clone + Send {
    let pieces = (parts > 1).then_some(pieces.max(2));
    let levels =
        successors(pieces, move |pieces| (parts.div_ceil(*pieces) > 1).then(|| (pieces * 2).min(parts)));
    levels.flat_map(move |pieces| {
        let size = parts.div_ceil(pieces);
        (0..parts).step_by(size).flat_map(move |start| {
            let range = start..(start + size).min(parts);
            let piece = Candidate { range: range.clone(), is_rest: false, pieces: 2 };
            // With two pieces, the rest without one is the other.
            let rest = (pieces > 2).then_some(Candidate { range, is_rest: true, pieces: pieces - 1 });
            once(piece).chain(rest)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::hash::{DefaultHasher, Hasher as _};

    use super::{Candidate, LostVersion, Part, candidates};

    /// Function that returns true for the parts with which a check fails.
    type Fails<'a> = dyn Fn(&[Part]) -> bool + 'a;

    /// Delta debugging, level by level: all pieces and rests with one number of pieces, then with twice as many.
    fn reference(mut parts: Vec<Part>, fails: &Fails<'_>) -> Vec<Part> {
        let mut pieces = 2;
        while parts.len() > 1 {
            let size = parts.len().div_ceil(pieces);
            let mut smaller = None;
            for (index, piece) in parts.chunks(size).enumerate() {
                if fails(piece) {
                    smaller = Some((piece.to_vec(), 2));
                    break;
                }
                let others = parts.chunks(size).enumerate().filter(|(other, _)| *other != index);
                let rest = others.flat_map(|(_, piece)| piece.to_vec()).collect::<Vec<_>>();
                if pieces > 2 && fails(&rest) {
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
        parts
    }

    fn by_candidates(mut parts: Vec<Part>, fails: &Fails<'_>) -> Vec<Part> {
        let lost =
            |parts: &[Part], candidate: &Candidate| -> Vec<_> { candidate.lost(parts).cloned().collect() };
        let mut pieces = 2;
        while let Some(failing) =
            candidates(parts.len(), pieces).find(|candidate| fails(&lost(&parts, candidate)))
        {
            (parts, pieces) = (lost(&parts, &failing), failing.pieces);
        }
        parts
    }

    #[test]
    fn candidates_reduce_like_delta_debugging() {
        for len in 0..40 {
            for seed in 0..60 {
                let parts: Vec<Part> = (0..len).map(|write| vec![(write, 7)]).collect();
                // Half of the checks need some parts, the others fail at random.
                let needs = |part: &LostVersion| hash(&(seed, part)) % 5 == 0;
                let fails = |lost: &[Part]| {
                    let has = |part: &Part| lost.contains(part);
                    if seed % 2 == 0 {
                        parts.iter().filter(|part| needs(&part[0])).all(has)
                    } else {
                        hash(&(seed, lost)) % 3 == 0
                    }
                };
                assert_eq!(
                    by_candidates(parts.clone(), &fails),
                    reference(parts.clone(), &fails),
                    "{len}, {seed}"
                );
            }
        }
        assert_eq!(candidates(1, 2).count(), 0);
        assert_eq!(
            candidates(3, 2).map(|each| each.range).collect::<Vec<_>>(),
            [0..2, 2..3, 0..1, 0..1, 1..2, 1..2, 2..3, 2..3]
        );
    }

    fn hash(value: &impl std::hash::Hash) -> u64 {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        hasher.finish()
    }
}
