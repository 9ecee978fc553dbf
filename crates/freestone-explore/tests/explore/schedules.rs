//! Order and bounds of explorations: a small budget covers the whole log.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use freestone_explore::{Budget, End, Model, Options, Progress, Watch, explore};

use crate::harness::{CheckBy, Op, Recorded, options};

/// 400 writes with a flush after every fifth.
fn long_log() -> Recorded {
    let write =
        |index: u64| [Op::Write(index % 8 * 8, 8)].into_iter().chain((index % 5 == 4).then_some(Op::Flush));
    Recorded::new(&(0..400).flat_map(write).collect::<Vec<_>>())
}

#[test]
fn small_budget_covers_the_whole_log() {
    let points = Mutex::new(Vec::new());
    let check = CheckBy(|_: &[u8], state: &freestone_explore::State| {
        points.lock().unwrap().push((state.point(), !state.id().lost.is_empty()));
        true
    });
    for model in [Model::Prefix, Model::Subset] {
        let options = Options { budget: Budget::States(60), ..options(&[model]) };
        let report = long_log().explore(&options, &check);
        assert_eq!((report.end, report.states), (End::Budget, 60));
        let mut points = std::mem::take(&mut *points.lock().unwrap());
        points.sort_unstable();
        for part in 0..8 {
            let in_part = points.iter().filter(|(point, _)| point * 8 / report.entries == part);
            assert!(in_part.count() >= 3, "{model:?}, part {part}: {points:?}");
        }
    }
}

#[test]
fn same_seed_gives_the_same_states() {
    let ops: Vec<_> = (0..20).map(|index| Op::Write(index * 3 % 60, 4)).collect();
    let recorded = Recorded::new(&ops);
    let ids = |seed| {
        let ids = Mutex::new(Vec::new());
        let check = CheckBy(|_: &[u8], state: &freestone_explore::State| {
            ids.lock().unwrap().push(state.id().to_string());
            true
        });
        let options = Options { seed, budget: Budget::States(300), ..options(&[Model::Subset, Model::Torn]) };
        recorded.explore(&options, &check);
        let mut ids = ids.into_inner().unwrap();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids(7), ids(7));
    assert_ne!(ids(7), ids(8));
}

#[test]
fn watch_stops_the_exploration() {
    struct StopAfter(AtomicU64);
    impl Watch for StopAfter {
        fn should_stop(&self) -> bool {
            self.0.load(SeqCst) > 20
        }

        fn report(&self, progress: &Progress) {
            self.0.store(progress.done, SeqCst);
        }
    }
    let check = CheckBy(|_: &[u8], _: &_| true);
    let report =
        explore(&long_log().timeline(), &options(&[Model::Prefix]), &check, &StopAfter(AtomicU64::new(0)))
            .unwrap();
    assert!(report.end == End::Stopped && report.states < 40, "{} states", report.states);
}
