//! Records short logs, and checks that collect the content of states.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use freestone_core::device::{Blocking as _, Device, Flags};
use freestone_drive::power::{Config, Power, log};
use freestone_explore::{
    Base, Budget, Check, Model, Options, Progress, Report, Result, State, Timeline, Verdict, Watch, explore,
    state_at,
};
use freestone_ram::ram::{Config as RamConfig, Ram};
use freestone_testkit::effort;
use proptest::prelude::*;
use tempfile::TempDir;

/// Size of the recorded disk in bytes.
pub const DISK_BYTES: u64 = 32 << 10;

/// A request to the recorded disk. Offsets and lengths are in sectors of 512 bytes.
#[derive(Debug, Clone)]
pub enum Op {
    Write(u64, u64),
    Fua(u64, u64),
    Discard(u64, u64),
    Flush,
    Mark,
}

/// A recorded log, removed at the end.
pub struct Recorded {
    dir: TempDir,
}

impl Recorded {
    /// Records requests. Each write has a content of its own.
    pub fn new(ops: &[Op]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ram = Ram::new(RamConfig { disksize: DISK_BYTES, ..RamConfig::default() }).unwrap();
        let record = Some(log::Writer::create(&dir.path().join("log")).unwrap());
        let device = Power::new(Arc::new(ram), Config { record, ..Config::default() }).unwrap();
        for (index, op) in ops.iter().enumerate() {
            let data = |sectors: u64| vec![(index % 255) as u8 + 1; sectors as usize * 512];
            match op {
                Op::Write(at, len) => device.write_at(at * 512, &data(*len), Flags::empty()).unwrap(),
                Op::Fua(at, len) => device.write_at(at * 512, &data(*len), Flags::FUA).unwrap(),
                Op::Discard(at, len) => device.discard(at * 512, len * 512).unwrap(),
                Op::Flush => device.flush().unwrap(),
                Op::Mark => _ = device.mark(&format!("mark {index}")).unwrap(),
            }
        }
        drop(device);
        Self { dir }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    pub fn timeline(&self) -> Arc<Timeline> {
        Arc::new(Timeline::open(&self.path(), Base::Zeroes(DISK_BYTES), 0).unwrap())
    }

    /// Returns the content after the whole log.
    pub fn last_content(&self) -> Vec<u8> {
        let timeline = self.timeline();
        let id = timeline.entries().to_string().parse().unwrap();
        content(&state_at(&timeline, &id).unwrap().disk().unwrap())
    }

    pub fn explore(&self, options: &Options, check: &dyn Check) -> Report {
        explore(&self.timeline(), options, check, &Unwatched).unwrap()
    }
}

/// Returns options for a small log: all states, with two jobs.
pub fn options(models: &[Model]) -> Options {
    Options {
        models: models.to_vec(),
        unit: 512,
        seed: 1,
        jobs: NonZeroUsize::new(2).unwrap(),
        budget: Budget::States(100_000),
        stop_at_first: false,
    }
}

/// Returns random requests.
pub fn op() -> impl Strategy<Value = Op> {
    // Half of the writes lie in the first two blocks, so that they overlap.
    let place =
        || prop_oneof![(0..15_u64, 1..4_u64), (0..6_u64, 1..2_u64).prop_map(|(at, len)| (at * 8, len * 8))];
    prop_oneof![
        5 => place().prop_map(|(at, len)| Op::Write(at, len)),
        1 => place().prop_map(|(at, len)| Op::Fua(at, len)),
        1 => place().prop_map(|(at, len)| Op::Discard(at, len)),
        1 => Just(Op::Flush),
        1 => Just(Op::Mark),
    ]
}

/// Returns the settings of random tests.
pub fn config() -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    // Sanitizers set the number of cases in the environment.
    let is_set = std::env::var_os("PROPTEST_CASES").is_some();
    if is_set { default } else { ProptestConfig { cases: effort(24, 400), ..default } }
}

pub fn verdict(passed: bool) -> Verdict {
    Verdict { passed, end: String::new(), output: String::new(), time: Duration::ZERO }
}

pub struct Unwatched;

impl Watch for Unwatched {
    fn should_stop(&self) -> bool {
        false
    }

    fn report(&self, _: &Progress) {}
}

pub fn content(disk: &dyn Device) -> Vec<u8> {
    let mut content = vec![0; DISK_BYTES as usize];
    disk.read_at(0, &mut content).unwrap();
    content
}

/// Content and mark of a state.
pub type Seen = (Vec<u8>, Option<String>);

/// Check that passes each state, and collects its content with its identifier.
#[derive(Default)]
pub struct Collect {
    pub states: Mutex<HashMap<Seen, Vec<String>>>,
}

impl Check for Collect {
    fn check(&self, _: usize, state: &State, disk: Arc<dyn Device>) -> Result<Option<Verdict>> {
        let seen = (content(&*disk), state.mark().map(ToOwned::to_owned));
        self.states.lock().unwrap().entry(seen).or_default().push(state.id().to_string());
        // Writes of a check must not reach other states.
        disk.write_at(0, &vec![0xee; DISK_BYTES as usize], Flags::empty()).unwrap();
        Ok(Some(verdict(true)))
    }
}

/// Check by a function of content and state.
pub struct CheckBy<F>(pub F);

impl<F: Fn(&[u8], &State) -> bool + Sync> Check for CheckBy<F> {
    fn check(&self, _: usize, state: &State, disk: Arc<dyn Device>) -> Result<Option<Verdict>> {
        Ok(Some(verdict((self.0)(&content(&*disk), state))))
    }
}
