//! Reductions in parallel: the result is that of one job, and the checks run at the same time.

use std::hash::{DefaultHasher, Hasher as _};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use freestone_explore::{Budget, Model, Options, Phase, Progress, Report, State, Watch, explore};
use proptest::prelude::*;

use crate::harness::{CheckBy, Op, Recorded, config, options};

/// Longest wait for a second check at the same time.
const TOGETHER_MAX: Duration = Duration::from_secs(60);
/// Number of states of a random log that are checked.
const STATES_MAX: u64 = 60;

fn hash(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Explores with a check that rejects every `one_in`th content except the last one, in no regular order.
fn explore_with(recorded: &Recorded, jobs: usize, seed: u64, one_in: u64) -> Report {
    let last = recorded.last_content();
    let check = CheckBy(|content: &[u8], _: &State| {
        let hash = hash(&(seed, content));
        // Checks end in another order than they begin.
        thread::sleep(Duration::from_micros(hash / one_in % 100));
        content == last || !hash.is_multiple_of(one_in)
    });
    let jobs = NonZeroUsize::new(jobs).unwrap();
    let budget = Budget::States(STATES_MAX);
    let options = Options { jobs, budget, ..options(&[Model::Prefix, Model::Subset, Model::Torn]) };
    Report { time: Duration::ZERO, ..recorded.explore(&options, &check) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: config().cases.div_ceil(4), ..config() })]

    #[test]
    fn result_does_not_depend_on_jobs(
        places in prop::collection::vec((0..12_u64, 1..4_u64), 1..7), flush in 0..4_usize, seed: u64, one_in in 2..9_u64,
    ) {
        let mut ops: Vec<_> = places.into_iter().map(|(at, len)| Op::Write(at * 4, len)).collect();
        ops.insert(flush.min(ops.len()), Op::Flush);
        let recorded = Recorded::new(&ops);
        let one = explore_with(&recorded, 1, seed, one_in);
        prop_assert_eq!(&explore_with(&recorded, 7, seed, one_in), &one);
        prop_assert_eq!(&explore_with(&recorded, 2, seed, one_in), &one);
    }
}

#[test]
fn reduction_checks_at_the_same_time() {
    /// Notices the second phase.
    struct Phases(AtomicBool);
    impl Watch for Phases {
        fn should_stop(&self) -> bool {
            false
        }

        fn report(&self, progress: &Progress) {
            self.0.store(progress.phase == Phase::Reduce, SeqCst);
        }
    }
    let recorded = Recorded::new(&[1, 2, 3, 4, 5, 6, 7].map(|block| Op::Write(block * 8, 8)));
    let (phases, running) = (Phases(AtomicBool::new(false)), (Mutex::new((0, 0)), Condvar::new()));
    let check = CheckBy(|content: &[u8], _: &State| {
        if phases.0.load(SeqCst) {
            let (counts, changed) = &running;
            let mut counts = counts.lock().unwrap();
            let (now, most) = &mut *counts;
            *now += 1;
            *most = *now.max(most);
            changed.notify_all();
            let (mut counts, wait) =
                changed.wait_timeout_while(counts, TOGETHER_MAX, |(_, most)| *most < 2).unwrap();
            assert!(!wait.timed_out(), "the checks of the reduction run one after another");
            counts.0 -= 1;
        }
        content[3 * 4096] != 0 || content[5 * 4096] != 0 || content[7 * 4096] == 0
    });
    let report = explore(&recorded.timeline(), &options(&[Model::Subset]), &check, &phases).unwrap();
    let [failure] = &report.failures[..] else { panic!("{:#?}", report.failures) };
    assert_eq!(failure.lost.iter().map(|lost| lost.entry).collect::<Vec<_>>(), [3, 5]);
}
