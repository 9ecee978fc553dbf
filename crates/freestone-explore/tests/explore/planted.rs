//! Ten errors that programs make, each in a small store, and the store without error.

use std::num::NonZeroUsize;
use std::sync::Arc;

use freestone_core::device::Device;
use freestone_drive::power::{Config, Power, log};
use freestone_explore::{
    Base, Budget, Check, End, Model, Options, Report, Result, State, Timeline, Verdict, explore,
};
use freestone_ram::ram::{Config as RamConfig, Ram};

use crate::harness::{Unwatched, verdict};
use crate::store::{Bug, verify, workload};

const SIZE_BYTES: u64 = 256 << 10;

struct Verify(Bug);

impl Check for Verify {
    fn check(&self, _: usize, state: &State, disk: Arc<dyn Device>) -> Result<Option<Verdict>> {
        let acknowledged = state.mark().and_then(|mark| mark.strip_prefix("put ")?.parse().ok());
        let verified = verify(&*disk, self.0, acknowledged);
        let output = verified.clone().err().unwrap_or_default();
        Ok(Some(Verdict { output, ..verdict(verified.is_ok()) }))
    }
}

fn explore_store(bug: Bug, models: &[Model]) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let ram = Ram::new(RamConfig { disksize: SIZE_BYTES, ..RamConfig::default() }).unwrap();
    let record = Some(log::Writer::create(&path).unwrap());
    let device = Power::new(Arc::new(ram), Config { record, ..Config::default() }).unwrap();
    workload(&device, bug, 12, &mut |put| _ = device.mark(&format!("put {put}")).unwrap()).unwrap();
    drop(device);
    let timeline = Arc::new(Timeline::open(&path, Base::Zeroes(SIZE_BYTES), 0).unwrap());
    let options = Options {
        models: models.to_vec(),
        unit: 512,
        seed: 1,
        jobs: NonZeroUsize::new(2).unwrap(),
        budget: Budget::States(2000),
        stop_at_first: true,
    };
    explore(&timeline, &options, &Verify(bug), &Unwatched).unwrap()
}

#[test]
fn correct_store_has_no_failure() {
    let report = explore_store(Bug::None, &[Model::Prefix, Model::Subset, Model::Torn]);
    assert!(report.failures.is_empty() && report.flaky.is_empty(), "{:#?}", report.failures);
    assert!(report.states > 300, "{} states", report.states);
}

#[test]
fn each_planted_error_is_found() {
    for (name, bug) in Bug::ALL.into_iter().filter(|(_, bug)| *bug != Bug::None) {
        // Only a disk that tears blocks damages the header.
        let models: &[Model] =
            if bug == Bug::TornHeader { &[Model::Torn] } else { &[Model::Prefix, Model::Subset] };
        let report = explore_store(bug, models);
        assert!(!report.failures.is_empty(), "{name} was not found in {} states", report.states);
        assert_eq!(report.end, End::FirstFailure, "{name}: {:#?}", report.failures);
        assert!(report.failures.iter().all(|failure| !failure.verdict.output.is_empty()), "{name}");
    }
}
