//! An exploration: rounds of checks, then the reduction of the failures.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::sync::Mutex;
use freestone_ram::ram::OverBaseView;

use crate::candidates::Candidates;
use crate::epoch::Lost;
use crate::reduction::{Failing, Reduction};
use crate::report::{End, Failure, Flaky, Phase, Progress, Report};
use crate::run::{Check, Outcome, Watch, check_twice, run_checks};
use crate::schedule::{Model, Schedule};
use crate::state::{State, Window};
use crate::timeline::Timeline;
use crate::walk::Walk;
use crate::{BLOCK_BYTES, ExploreError, Result, StateId};

/// Maximum number of windows with failures. Further failures would hardly help the reader.
const FAILING_WINDOWS_MAX: usize = 50;
/// Maximum number of failing states of one window that are kept to be reduced.
const FAILING_MAX: usize = 16;
/// Maximum number of flaky states that are reported.
const FLAKY_MAX: usize = 50;
/// Number of rounds without a new state after which an exploration ends, if only random choices are left.
const IDLE_ROUNDS_MAX: u32 = 3;

/// Limit of an exploration, without the reduction of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// Number of states to check.
    States(u64),
    /// Time after which no further state is checked.
    Time(Duration),
}

/// Settings of an exploration.
#[derive(Debug, Clone)]
pub struct Options {
    /// Models of the power loss; at least one.
    pub models: Vec<Model>,
    /// Unit of [`Model::Torn`] in bytes.
    pub unit: u64,
    /// Seed of random choices.
    pub seed: u64,
    /// Number of checks that run at the same time.
    pub jobs: NonZeroUsize,
    /// Limit of the exploration.
    pub budget: Budget,
    /// True to end after the first failure, which is reduced.
    pub stop_at_first: bool,
}

/// Place of a state in the exploration.
struct Place {
    /// Number of the state, from 1.
    number: u64,
    /// True if the state is a choice of lost writes, false if it is a prefix of the log.
    has_lost: bool,
}

/// Verdicts of the first phase.
#[derive(Default)]
struct Verdicts {
    states: u64,
    failing_states: u64,
    /// Failing states by window, with the number of all of them.
    failing: BTreeMap<u64, (u64, Vec<Failing>)>,
    flaky: Vec<Flaky>,
    end: Option<End>,
}

/// Explores the states of a run.
///
/// # Errors
/// A unit is invalid, the log cannot be read any more, memory is short, or the check cannot be run.
pub fn explore(
    timeline: &Arc<Timeline>,
    options: &Options,
    check: &dyn Check,
    watch: &dyn Watch,
) -> Result<Report> {
    let start = Instant::now();
    let units = Units::new(timeline, options)?;
    let schedule = Schedule::new(timeline, &options.models, options.unit);
    let mut verdicts = Verdicts::default();
    let mut seen = HashSet::new();
    let mut duplicates = 0;
    let early = |failures: Vec<Failure>, end| Report {
        entries: timeline.entries(),
        states: failures.len() as u64,
        duplicates: 0,
        failing_states: failures.len() as u64,
        reductions: 0,
        failures,
        flaky: Vec::new(),
        end,
        time: start.elapsed(),
    };
    match check_final_state(timeline, &units, check, &mut seen)? {
        FinalState::Passed => verdicts.states = 1,
        FinalState::Failed(failure) => return Ok(early(vec![failure], End::FinalState)),
        FinalState::Stopped => return Ok(early(Vec::new(), End::Stopped)),
    }
    let verdicts = Mutex::new(verdicts);
    let collect = |state: &State, place, outcome| {
        let mut verdicts = verdicts.lock();
        verdicts.collect(timeline, options, state, place, outcome)
    };
    let produce = |send: &mut dyn FnMut(State, Place) -> bool| {
        let mut rounds = Rounds { timeline, options, units: &units, schedule: &schedule, watch, start };
        let mut number = 0;
        let mut send = |state, has_lost| {
            number += 1;
            send(state, Place { number, has_lost })
        };
        let end = rounds.run(&mut seen, &mut duplicates, &verdicts, &mut send)?;
        if let Some(end) = end {
            verdicts.lock().end.get_or_insert(end);
        }
        Ok(())
    };
    run_checks(check, options.jobs, produce, collect)?;
    let verdicts = verdicts.into_inner();
    let end = if watch.should_stop() { End::Stopped } else { verdicts.end.unwrap_or(End::Stopped) };
    let (lost_units, digest_unit, jobs) = (&units.lost, units.digest, options.jobs);
    let reduction = Reduction { timeline, units: lost_units, digest_unit, check, watch, jobs };
    let (mut failures, reductions) = reduction.run(verdicts.failing)?;
    if options.stop_at_first {
        failures.truncate(1);
    }
    Ok(Report {
        entries: timeline.entries(),
        states: verdicts.states,
        duplicates,
        failing_states: verdicts.failing_states,
        reductions,
        failures,
        flaky: verdicts.flaky,
        end,
        time: start.elapsed(),
    })
}

/// Makes one state.
///
/// # Errors
/// [`ExploreError::NoState`] if the log has no such state, or [`ExploreError::BadUnit`]; else as
/// [`explore`].
pub fn state_at(timeline: &Arc<Timeline>, id: &StateId) -> Result<State> {
    let walk = walk_to(timeline, id)?;
    if id.lost.is_empty() {
        return walk.prefix();
    }
    let window = walk.window(id.unit)?;
    let lost = choice(&window, id)?;
    Ok(window.state(lost))
}

/// Makes one state as a read-only device whose [`Changes`](freestone_core::device::Changes) are those over
/// the base of the timeline.
///
/// # Errors
/// As [`state_at`].
pub fn changes_at(timeline: &Arc<Timeline>, id: &StateId) -> Result<OverBaseView> {
    let walk = walk_to(timeline, id)?;
    if id.lost.is_empty() {
        return walk.over_base();
    }
    let window = walk.window(id.unit)?;
    let lost = choice(&window, id)?;
    // A fork of the walk's disk would have its changes over that disk. So the kept writes are applied to the
    // disk of another walk, which stays at the last flush.
    let mut flushed = Walk::new(timeline, &[], id.unit)?;
    flushed.advance(window.flushed_point())?;
    window.replay_kept_on(&lost, flushed.disk())?;
    flushed.over_base()
}

/// Walks to the point of a state.
fn walk_to(timeline: &Arc<Timeline>, id: &StateId) -> Result<Walk> {
    if id.point > timeline.entries() {
        return Err(no_state(id, format!("the log has {} entries", timeline.entries())));
    }
    check_unit(timeline, id.unit)?;
    let units = if id.lost.is_empty() { Vec::new() } else { vec![id.unit] };
    let mut walk = Walk::new(timeline, &units, id.unit)?;
    walk.advance(id.point)?;
    Ok(walk)
}

fn choice(window: &Window, id: &StateId) -> Result<Lost> {
    window.epoch.choice(id).map_err(|why| no_state(id, why))
}

fn no_state(id: &StateId, why: String) -> ExploreError {
    ExploreError::NoState { id: id.clone(), why }
}

/// Block sizes of an exploration.
struct Units {
    /// Sizes of blocks in which writes are lost, in bytes.
    lost: Vec<u64>,
    /// Unit of digests in bytes.
    digest: u64,
}

impl Units {
    fn new(timeline: &Timeline, options: &Options) -> Result<Self> {
        let mut lost = Vec::new();
        if options.models.contains(&Model::Subset) {
            lost.push(BLOCK_BYTES);
        }
        if options.models.contains(&Model::Torn) {
            check_unit(timeline, options.unit)?;
            if !lost.contains(&options.unit) {
                lost.push(options.unit);
            }
        }
        let digest = lost.iter().copied().fold(BLOCK_BYTES, u64::min);
        Ok(Self { lost, digest })
    }
}

fn check_unit(timeline: &Timeline, unit: u64) -> Result<()> {
    let min = timeline.sector_bytes();
    if unit.is_power_of_two() && (min..=BLOCK_BYTES).contains(&unit) {
        return Ok(());
    }
    Err(ExploreError::BadUnit { unit, min, max: BLOCK_BYTES })
}

/// Result of checking the state after the whole log.
enum FinalState {
    Passed,
    Failed(Failure),
    Stopped,
}

/// Checks the state after the whole log.
fn check_final_state(
    timeline: &Arc<Timeline>,
    units: &Units,
    check: &dyn Check,
    seen: &mut HashSet<u128>,
) -> Result<FinalState> {
    let mut walk = Walk::new(timeline, &[], units.digest)?;
    walk.advance(timeline.entries())?;
    let state = walk.prefix()?;
    seen.insert(state.identity());
    let Some(Outcome { verdict, is_flaky }) = check_twice(check, 0, &state)? else {
        return Ok(FinalState::Stopped);
    };
    if verdict.passed || is_flaky {
        return Ok(FinalState::Passed);
    }
    Ok(FinalState::Failed(Failure {
        id: state.id().clone(),
        mark: state.mark().map(Into::into),
        lost: Vec::new(),
        verdict,
        states: 1,
        is_minimal: true,
    }))
}

impl Verdicts {
    /// Adds the outcome of a check. Returns false if the exploration must end.
    fn collect(
        &mut self,
        timeline: &Timeline,
        options: &Options,
        state: &State,
        Place { number, has_lost }: Place,
        outcome: Outcome,
    ) -> bool {
        self.states += 1;
        let Outcome { verdict, is_flaky } = outcome;
        if verdict.passed {
            return true;
        }
        if is_flaky {
            if self.flaky.len() < FLAKY_MAX {
                self.flaky.push(Flaky { id: state.id().clone(), verdict });
            }
            return true;
        }
        self.failing_states += 1;
        let (count, of_window) = self.failing.entry(timeline.window_of(state.point())).or_default();
        *count += 1;
        // Checks end in any order, so the first states are kept by number.
        let at = of_window.partition_point(|failing| failing.number < number);
        if at < FAILING_MAX {
            let mark = state.mark().map(Into::into);
            of_window.insert(at, Failing { id: state.id().clone(), mark, verdict, has_lost, number });
            of_window.truncate(FAILING_MAX);
        }
        let end = match options.stop_at_first {
            true => End::FirstFailure,
            false if self.failing.len() >= FAILING_WINDOWS_MAX => End::Failures,
            false => return true,
        };
        // The producer may have reached its end meanwhile.
        self.end = Some(end);
        false
    }
}

/// Function that checks a state, unless an equal state was checked: takes the identity, and a function
/// that makes the state. Breaks with the reason if the exploration must end.
type Offer<'a> =
    dyn FnMut(u128, &mut dyn FnMut() -> Result<(State, bool)>) -> Result<ControlFlow<Option<End>>> + 'a;

/// Candidates that are left after a round.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Rest {
    None,
    /// Random ones, of windows with many choices.
    Random,
    /// Some windows still have choices of which all are tried.
    All,
}

/// Producer of the states, round by round.
struct Rounds<'a> {
    timeline: &'a Arc<Timeline>,
    options: &'a Options,
    units: &'a Units,
    schedule: &'a Schedule,
    watch: &'a dyn Watch,
    start: Instant,
}

impl Rounds<'_> {
    /// Sends the states of all rounds. Returns the reason of the end, or `None` if `send` returned
    /// false.
    fn run(
        &mut self,
        seen: &mut HashSet<u128>,
        duplicates: &mut u64,
        verdicts: &Mutex<Verdicts>,
        send: &mut dyn FnMut(State, bool) -> bool,
    ) -> Result<Option<End>> {
        // The final state was checked already.
        let mut count = 1;
        let mut idle = 0;
        for round in 0..self.schedule.rounds() {
            let before = count;
            let mut offer = |identity: u128, make: &mut dyn FnMut() -> Result<(State, bool)>| {
                if self.watch.should_stop() {
                    return Ok(ControlFlow::Break(Some(End::Stopped)));
                }
                let is_known = seen.contains(&identity);
                let is_used_up = match self.options.budget {
                    // Equal states cost nothing but time.
                    Budget::States(states) => !is_known && count >= states,
                    Budget::Time(time) => self.start.elapsed() >= time,
                };
                if is_used_up {
                    return Ok(ControlFlow::Break(Some(End::Budget)));
                }
                if is_known {
                    *duplicates += 1;
                    return Ok(ControlFlow::Continue(()));
                }
                seen.insert(identity);
                let (state, has_lost) = make()?;
                if !send(state, has_lost) {
                    return Ok(ControlFlow::Break(None));
                }
                count += 1;
                self.report(count, *duplicates, verdicts);
                Ok(ControlFlow::Continue(()))
            };
            let rest = match self.round(round, &mut offer)? {
                ControlFlow::Break(end) => return Ok(end),
                ControlFlow::Continue(rest) => rest,
            };
            if !self.schedule.is_covered(round) {
                continue;
            }
            idle = if count == before && rest == Rest::Random { idle + 1 } else { 0 };
            if rest == Rest::None || idle == IDLE_ROUNDS_MAX {
                break;
            }
        }
        Ok(Some(End::Complete))
    }

    fn report(&self, count: u64, duplicates: u64, verdicts: &Mutex<Verdicts>) {
        let (done, failing) = {
            let verdicts = verdicts.lock();
            (verdicts.states, verdicts.failing_states)
        };
        let total = match self.options.budget {
            Budget::States(states) => Some(states.max(count)),
            Budget::Time(_) => None,
        };
        self.watch.report(&Progress { phase: Phase::Explore, done, total, failing, duplicates });
    }

    /// Offers the states of a round. Returns the end that an offer returned, or the candidates that are
    /// left.
    fn round(&self, round: u32, offer: &mut Offer<'_>) -> Result<ControlFlow<Option<End>, Rest>> {
        let mut walk = Walk::new(self.timeline, &self.units.lost, self.units.digest)?;
        let windows = self.timeline.windows();
        let mut next = 0;
        let mut rest = Rest::None;
        for point in 0..=self.timeline.entries() {
            walk.advance(point)?;
            if self.schedule.has_prefix(round, point)
                && let ControlFlow::Break(end) = offer(walk.identity(), &mut || Ok((walk.prefix()?, false)))?
            {
                return Ok(ControlFlow::Break(end));
            }
            if windows.get(next) != Some(&point) {
                continue;
            }
            let indices = self.schedule.candidates(round, next as u64);
            next += 1;
            if indices.is_empty() {
                continue;
            }
            for &(loss, unit) in self.schedule.losses() {
                let window = walk.window(unit)?;
                let candidates = Candidates::new(&window.epoch, loss, point, self.options.seed);
                for index in indices.clone() {
                    let Some(lost) = candidates.get(index) else { break };
                    let mut state = || Ok((window.state(lost.clone()), true));
                    if let ControlFlow::Break(end) = offer(window.identity(&lost), &mut state)? {
                        return Ok(ControlFlow::Break(end));
                    }
                }
                if candidates.get(indices.end).is_some() {
                    rest = rest.max(if candidates.has_all_choices() { Rest::All } else { Rest::Random });
                }
            }
        }
        Ok(ControlFlow::Continue(rest))
    }
}
