//! The unit that a power cut does not tear. After a cut, each unit shows one of its writes, for any
//! size of writes, cache and requests below.

use std::sync::Arc;

use freestone_core::device::{Blocking, Buffer, Device, Flags, Request, TryResult};
use freestone_drive::power::{Config, Power, log};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

use crate::power::model::filled;

const BLOCK: usize = 512;
const SIZE: usize = 200 << 10;

/// Contents that each unit may have after a cut: the durable one, and the content after each later
/// write.
struct Units {
    unit: usize,
    states: Vec<Vec<Vec<u8>>>,
}

impl Units {
    fn new(unit: usize) -> Self {
        let state = |at: usize| vec![vec![0; unit.min(SIZE - at)]];
        Self { unit, states: (0..SIZE).step_by(unit).map(state).collect() }
    }

    fn write(&mut self, offset: usize, data: &[u8], durable: bool) {
        for at in offset / self.unit..(offset + data.len()).div_ceil(self.unit) {
            let states = &mut self.states[at];
            let mut state = states.last().unwrap().clone();
            let start = at * self.unit;
            let (from, to) = (offset.max(start), (offset + data.len()).min(start + state.len()));
            state[from - start..to - start].copy_from_slice(&data[from - offset..to - offset]);
            if durable {
                states.clear();
            }
            states.push(state);
        }
    }

    fn flush(&mut self) {
        for states in &mut self.states {
            states.drain(..states.len() - 1);
        }
    }

    fn now(&self) -> Vec<u8> {
        self.states.iter().flat_map(|states| states.last().unwrap().clone()).collect()
    }

    /// Checks the device after a cut. Returns the numbers of units with the oldest, an intermediate
    /// and the newest allowed content, among units with several allowed contents.
    fn settle(&mut self, device: &dyn Device, context: &str) -> [u32; 3] {
        let mut ends = [0; 3];
        for (number, states) in self.states.iter_mut().enumerate() {
            let mut found = vec![0; states[0].len()];
            device.read_at((number * self.unit) as u64, &mut found).unwrap();
            let end = states.iter().position(|state| *state == found);
            let end = end.unwrap_or_else(|| panic!("{context}: unit {number} is torn"));
            if states.len() > 1 {
                let which = if end == 0 { 0 } else { 1 + usize::from(end == states.len() - 1) };
                ends[which] += 1;
            }
            *states = vec![found];
        }
        ends
    }
}

#[test]
fn no_unit_is_torn() {
    let folder = tempfile::tempdir().unwrap();
    let mut total = [0; 3];
    for seed in 0..effort(20, 120) {
        let mut rng = Rng::new(seed);
        let unit = [512, 2048, 4096, 64 << 10][rng.below(4) as usize];
        let capacity = [0, 1, 5000, 40 << 10][rng.below(4) as usize];
        let model = Arc::new(Model::new(SIZE, BLOCK as u32));
        let below: Arc<dyn Device> = match rng.below(3) {
            0 => model,
            // Some requests complete in part on the caller's thread.
            1 => Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(60), seed)),
            _ => Arc::new(DeferringDevice::new(model, DeferPolicy::Always, seed)),
        };
        let path = folder.path().join(seed.to_string());
        let record = Some(log::Writer::create(&path).unwrap());
        let config = Config { capacity, record, unit: unit as u32 };
        let device = Power::new(Arc::clone(&below), config).unwrap();
        let mut units = Units::new(unit);
        let mut value = 1;
        for round in 0..3 {
            let context = format!("seed {seed}, unit {unit}, capacity {capacity}, round {round}");
            for _ in 0..rng.below(60) {
                let most = if rng.chance(15) { 200 } else { 2 * unit.min(8192) / BLOCK };
                let count = 1 + rng.below(most as u64) as usize;
                let first = rng.below((SIZE / BLOCK - count) as u64) as usize;
                let (offset, len) = (first * BLOCK, count * BLOCK);
                let durable = rng.chance(10);
                let flags = if durable { Flags::FUA } else { Flags::empty() };
                match rng.below(12) {
                    0 => {
                        device.flush().unwrap();
                        units.flush();
                    }
                    1 | 2 => {
                        device.write_zeroes(offset as u64, len as u64, flags).unwrap();
                        units.write(offset, &vec![0; len], durable);
                    }
                    3 => {
                        device.discard(offset as u64, len as u64).unwrap();
                        units.write(offset, &vec![0; len], false);
                    }
                    _ => {
                        let data = filled(value, count);
                        value += count as u64;
                        device.write_at(offset as u64, &data, flags).unwrap();
                        units.write(offset, &data, durable);
                    }
                }
            }
            let mut now = vec![0; SIZE];
            device.read_at(0, &mut now).unwrap();
            assert!(now == units.now(), "{context}: before the cut");
            device.cut(seed * 5 + round).unwrap();
            let ends = units.settle(&device, &context);
            (0..3).for_each(|end| total[end] += ends[end]);
        }
        drop(device);
        let replayed = Model::new(SIZE, BLOCK as u32);
        let mut reader = log::Reader::open(&path).unwrap();
        let entries = reader.entries();
        log::replay(&mut reader, entries, &replayed).unwrap();
        let mut all = vec![0; SIZE];
        replayed.read_at(0, &mut all).unwrap();
        assert!(all == units.now(), "seed {seed}: what the log says");
    }
    assert!(total.iter().all(|&ends| ends > effort(50, 300)), "{total:?}");
}

#[test]
fn default_unit_is_the_physical_block() {
    use freestone_ram::ram::{self, Family};
    let below = || Arc::new(Family::new(ram::Config::default()).unwrap().ram(1 << 20).unwrap());
    let unit = |unit| Power::new(below(), Config { unit, ..Config::default() }).map(|power| power.unit());
    assert_eq!((unit(0).unwrap(), unit(512).unwrap(), unit(65536).unwrap()), (4096, 512, 65536));
    for bad in [256, 1000, 128 << 10] {
        let error = unit(bad).unwrap_err().to_string();
        assert_eq!(error, format!("a unit is a power of two from 512 to 65536 bytes, not {bad}"));
    }
    // With a unit of 4096 bytes, no page is torn. With a unit of 512 bytes, some pages are torn.
    let torn = |unit: u32| {
        let device = Power::new(below(), Config { unit, ..Config::default() }).unwrap();
        device.write_at(0, &vec![1; 400 << 10], Flags::empty()).unwrap();
        let cut = device.cut(7).unwrap();
        assert_eq!(cut.kept_blocks + cut.lost_blocks, (400 << 10) / device.unit());
        let mut data = vec![0; 400 << 10];
        device.read_at(0, &mut data).unwrap();
        data.chunks(4096).filter(|page| page.iter().any(|byte| *byte != page[0])).count()
    };
    assert_eq!((torn(0), torn(16384)), (0, 0));
    assert!(torn(512) > 50);
}

/// The device under the power layer completes a part of a write on the caller's thread. The power
/// is cut before the rest is submitted.
#[test]
fn write_through_that_stops_in_a_unit_is_not_torn() {
    const LEN: usize = 32 << 10;
    let mut stopped = 0;
    for seed in 0..300 {
        let model = Arc::new(Model::new(SIZE, BLOCK as u32));
        let below = Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(60), seed));
        let device = Power::new(below, Config { unit: 4096, ..Config::default() }).unwrap();
        device.write_at(0, &vec![1; LEN], Flags::FUA).unwrap();
        // The write starts in the middle of a unit.
        let request = Request::write(1024, LEN as u64 - 2048).with(Flags::FUA);
        let tried = device.try_io(&request, Buffer::Write(&vec![2; LEN - 2048])).unwrap();
        device.cut(seed).unwrap();
        let mut data = vec![0; LEN];
        device.read_at(0, &mut data).unwrap();
        let new: Vec<_> = data[1024..LEN - 1024].iter().map(|byte| *byte == 2).collect();
        let done = new.iter().take_while(|new| **new).count();
        assert!(new[done..].iter().all(|new| !new), "seed {seed}: {tried:?}: not one piece");
        assert!(done == new.len() || (done + 1024) % 4096 == 0 || done == 0, "seed {seed}: {done} bytes");
        if let TryResult::Partly(bytes) = tried {
            assert!(bytes as usize <= done, "seed {seed}: {bytes} of {done} were answered");
        }
        stopped += u32::from(tried != TryResult::Done && done > 0);
    }
    assert!(stopped > 30, "{stopped}");
}
