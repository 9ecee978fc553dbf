//! The second phase of an exploration: reduces failing states, and joins equal failures.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::epoch::Lost;
use crate::report::{Failure, LostWrite, Phase, Progress, Verdict};
use crate::run::{Check, Watch};
use crate::shrink::{LostVersion, Reduced, Reducer};
use crate::state::Window;
use crate::timeline::Timeline;
use crate::walk::Walk;
use crate::{Result, StateId};

/// Failing state before its reduction.
pub struct Failing {
    pub id: StateId,
    pub mark: Option<String>,
    pub verdict: Verdict,
    /// True if the state is a choice of lost writes, false if it is a prefix of the log.
    pub has_lost: bool,
    /// Number of the state in the order of the exploration, which does not depend on the jobs.
    pub number: u64,
}

/// The second phase.
pub struct Reduction<'a> {
    pub timeline: &'a Arc<Timeline>,
    /// Sizes of blocks in which writes are lost, in bytes.
    pub units: &'a [u64],
    pub check: &'a dyn Check,
    pub watch: &'a dyn Watch,
    /// Number of checks at the same time.
    pub jobs: NonZeroUsize,
    /// Unit of digests in bytes.
    pub digest_unit: u64,
}

impl Reduction<'_> {
    /// Reduces the failing states. Returns the different failures, and the number of checks.
    pub fn run(&self, failing: BTreeMap<u64, (u64, Vec<Failing>)>) -> Result<(Vec<Failure>, u64)> {
        let mut failures: Vec<Failure> = Vec::new();
        let mut checks = 0;
        let mut walk = Walk::new(self.timeline, self.units, self.digest_unit)?;
        let (total, mut done) = (failing.len() as u64, 0);
        for (window, (count, states)) in failing {
            let (phase, failing) = (Phase::Reduce, failures.len() as u64);
            self.watch.report(&Progress { phase, done, total: Some(total), failing, duplicates: 0 });
            done += 1;
            // States that were not kept count for the first failure of their window.
            let uncounted = count - states.len() as u64;
            let found = if self.units.is_empty() {
                states.into_iter().map(|state| state.unreduced(Vec::new())).collect()
            } else {
                walk.advance(window)?;
                self.reduce_window(&walk, states, &mut checks)?
            };
            for (index, mut failure) in found.into_iter().enumerate() {
                failure.states += if index == 0 { uncounted } else { 0 };
                match failures.iter_mut().find(|other| is_same(other, &failure)) {
                    Some(other) => other.states += failure.states,
                    None => failures.push(failure),
                }
            }
        }
        failures.sort_by_key(|failure| failure.id.point);
        Ok((failures, checks))
    }

    fn reduce_window(&self, walk: &Walk, states: Vec<Failing>, checks: &mut u64) -> Result<Vec<Failure>> {
        let mut found: Vec<(Failure, u64, HashSet<LostVersion>)> = Vec::new();
        let mut unreduced = Vec::new();
        let mut reducers: BTreeMap<u64, Reducer<'_>> = BTreeMap::new();
        let mut choices = Vec::new();
        for state in states {
            let unit = if state.has_lost { state.id.unit } else { self.units[0] };
            let reducer = match reducers.entry(unit) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    entry.insert(Reducer::new(walk.window(unit)?, self.check, self.watch, self.jobs))
                }
            };
            let lost = state.choice(&reducer.window);
            choices.push((lost.map_or(0, |lost| lost.len()), unit, state));
        }
        // States that have lost little are reduced first: their lost writes may explain others.
        choices.sort_by_key(|(lost, ..)| *lost);
        for (_, unit, state) in choices {
            let Some(reducer) = reducers.get_mut(&unit) else { continue };
            let window = Arc::clone(&reducer.window);
            let Some(lost) = state.choice(&window) else {
                unreduced.push(state.unreduced(Vec::new()));
                continue;
            };
            let versions: HashSet<_> = window.epoch.lost_versions(&lost).into_iter().collect();
            if let Some((failure, ..)) =
                found.iter_mut().find(|(_, of, set)| *of == unit && set.is_subset(&versions))
            {
                failure.states += 1;
                continue;
            }
            let Reduced { lost, state: minimal, verdict, is_minimal } = reducer.reduce(&lost)?;
            let mut failure = state.unreduced(minimal.lost_writes());
            failure.id = minimal.id().clone();
            failure.verdict = verdict.unwrap_or(failure.verdict);
            failure.is_minimal = is_minimal;
            found.push((failure, unit, lost));
        }
        *checks += reducers.values().map(|reducer| reducer.checks).sum::<u64>();
        Ok(found.into_iter().map(|(failure, ..)| failure).chain(unreduced).collect())
    }
}

impl Failing {
    /// Returns the state as a choice of lost versions at its window: for a prefix, the writes between
    /// the point and the window. `None` if the window has no such choice.
    fn choice(&self, window: &Window) -> Option<Lost> {
        if self.has_lost {
            return window.epoch.choice(&self.id).ok();
        }
        let writes = &window.epoch.writes;
        // A bulk discard after the point cannot be lost.
        let after = writes.partition_point(|write| write.entry.number < self.id.point);
        let is_choice = writes[after..].iter().all(|write| !write.is_bulk)
            && self.mark.as_deref() == window.mark.as_deref();
        is_choice.then(|| window.epoch.lose(|write, _| write >= after))
    }

    fn unreduced(self, lost: Vec<LostWrite>) -> Failure {
        let Self { id, mark, verdict, .. } = self;
        Failure { id, mark, lost, verdict, states: 1, is_minimal: false }
    }
}

/// Returns true if two failures have the same lost writes, or without lost writes the same output.
fn is_same(one: &Failure, other: &Failure) -> bool {
    let key = |failure: &Failure| {
        let parts: Vec<_> = failure.lost.iter().map(|lost| (lost.entry, lost.offset, lost.len)).collect();
        (
            failure.lost.is_empty().then(|| (failure.verdict.output.clone(), failure.verdict.end.clone())),
            parts,
        )
    };
    key(one) == key(other)
}
