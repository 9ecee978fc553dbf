//! Power cuts: repeatable with the same seed, while threads write, and while requests wait or hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use freestone_core::device::{Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Request, TryResult};
use freestone_drive::power::{Config, Power};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng};

use crate::power::model::{BLOCK, BLOCKS, BlockModel, below, contents, filled, operate};

fn run(kind: usize, capacity: u64, seed: u64, cut: u64) -> Vec<u64> {
    let device = Power::new(below(kind, 77), Config { capacity, ..Config::default() }).unwrap();
    let mut rng = Rng::new(seed);
    let mut shadow = BlockModel::new();
    let mut next = 1;
    for _ in 0..80 {
        operate(&mut rng, &device, &mut shadow, &mut next);
    }
    device.cut(cut).unwrap();
    contents(&device)
}

#[test]
fn same_requests_and_seed_leave_the_same_content() {
    for (kind, capacity) in [(0, 0), (0, 20 << 10), (2, 0)] {
        for seed in 0..6 {
            let first = run(kind, capacity, seed, 1);
            assert_eq!(run(kind, capacity, seed, 1), first);
            if capacity == 0 {
                assert_eq!(run(0, 0, seed, 1), first, "whatever is below");
            }
        }
        let ends: Vec<_> = (0..4).map(|cut| run(kind, capacity, 9, cut)).collect();
        assert!(ends.windows(2).any(|pair| pair[0] != pair[1]), "every seed does the same");
    }
}

#[test]
fn kept_ranges_survive_every_cut() {
    for seed in 0..20 {
        let device = Power::new(below(0, 0), Config::default()).unwrap();
        device.write_at(0, &filled(1, 100), Flags::empty()).unwrap();
        device.keep(10 * 512, 20 * 512).unwrap();
        device.write_at(0, &filled(1001, 15), Flags::empty()).unwrap();
        let cut = device.cut(seed).unwrap();
        assert_eq!(cut.kept_blocks + cut.lost_blocks, 85);
        for (block, content) in contents(&device).into_iter().enumerate().take(30).skip(10) {
            let block = block as u64;
            assert!(content == 1 + block || (block < 15 && content == 1001 + block), "{block}: {content}");
        }
    }
    let device = Power::new(below(0, 0), Config::default()).unwrap();
    assert_eq!(device.keep(1, 512), Err(Error::Misaligned));
    assert_eq!(device.keep(0, 1 << 40), Err(Error::OutOfRange));
}

#[test]
fn cut_during_writes_keeps_flushed_data() {
    const THREADS: usize = 3;
    const OWN: usize = BLOCKS / THREADS;
    for seed in 0..40 {
        let capacity = [0, 4 << 10, 60 << 10][seed as usize % 3];
        let device = Arc::new(
            Power::new(below(seed as usize % 2 * 2, seed), Config { capacity, ..Config::default() }).unwrap(),
        );
        let stop = AtomicBool::new(false);
        let shared = Arc::new(thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let (device, stop) = (&device, &stop);
                    scope.spawn(move || write_until_stop(device, stop, thread * OWN, OWN, seed))
                })
                .collect();
            thread::sleep(Duration::from_micros(300 + seed * 37 % 1500));
            stop.store(true, Ordering::SeqCst);
            device.cut(seed).unwrap();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
        }));
        for (block, content) in contents(&*device).into_iter().enumerate().take(OWN * THREADS) {
            assert!(
                shared[block].contains(&content),
                "seed {seed}, block {block}: {content} of {:?}",
                shared[block]
            );
        }
        // The device is usable after the cut.
        device.write_at(0, &filled(5, 1), Flags::empty()).unwrap();
        device.flush().unwrap();
        assert_eq!(contents(&*device)[0], 5);
    }
}

/// Writes random blocks, sometimes with FUA or a flush, until `stop` is set. Returns the contents
/// that each block may have after the cut. The last request may complete before, at or after the
/// cut.
fn write_until_stop(device: &Power, stop: &AtomicBool, first: usize, own: usize, seed: u64) -> Vec<Vec<u64>> {
    let mut allowed = vec![vec![0]; own];
    let mut rng = Rng::new(seed * 100 + first as u64);
    for step in 1.. {
        let count = 1 + rng.below(20) as usize;
        let at = rng.below((own - count) as u64) as usize;
        let value = step * 1000;
        let fua = if rng.chance(20) { Flags::FUA } else { Flags::empty() };
        let outcome = if rng.below(8) == 0 {
            // A flush that completes after `stop` was set may have run after the cut, so earlier
            // writes may be lost.
            device.flush().map(|()| {
                if !stop.load(Ordering::SeqCst) {
                    allowed.iter_mut().for_each(keep_newest);
                }
            })
        } else {
            // A write that does not complete may or may not reach the device.
            for (number, block) in allowed[at..at + count].iter_mut().enumerate() {
                block.push(value + number as u64);
            }
            let written = device.write_at(((first + at) * BLOCK) as u64, &filled(value, count), fua);
            written.map(|()| {
                if !fua.is_empty() {
                    allowed[at..at + count].iter_mut().for_each(keep_newest);
                }
            })
        };
        match outcome {
            Ok(()) | Err(Error::Gone) if stop.load(Ordering::SeqCst) => break,
            Ok(()) => {}
            Err(error) => panic!("{error}"),
        }
    }
    allowed
}

fn keep_newest(block: &mut Vec<u64>) {
    block.drain(..block.len() - 1);
}

#[test]
fn cut_fails_waiting_requests_and_awaits_hung_ones() {
    let disk = Arc::new(FaultyDisk::new(1 << 20, 512));
    let device = Arc::new(Power::new(disk.clone(), Config { capacity: 4096, ..Config::default() }).unwrap());
    disk.fault(Some(freestone_core::device::Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    device.write_at(0, &filled(1, 8), Flags::empty()).unwrap();
    let (tx, rx) = mpsc::channel();
    let submit = |name: &'static str, request: Request, buffer| {
        let tx = tx.clone();
        let done = Completion::new(move |outcome, _| tx.send((name, outcome)).unwrap());
        device.submit(request, buffer, done);
    };
    // The write waits for space in the full cache, whose eviction hangs. The flush waits for the
    // same block.
    submit("write", Request::write(8192, 4096), IoBuf::copy_of(&filled(20, 8)).unwrap());
    submit("flush", Request::flush(), IoBuf::empty());
    disk.wait_held(1);
    let cut = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.cut(3))
    };
    let mut completions: Vec<_> = (0..2).map(|_| rx.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    completions.sort_by_key(|(name, _)| *name);
    assert_eq!(completions, [("flush", Err(Error::Gone)), ("write", Err(Error::Gone))]);
    // While the power is off, requests fail.
    assert_eq!(device.read_at(0, &mut [0; 512]), Err(Error::Gone));
    assert_eq!(device.keep(0, 512), Err(Error::Gone));
    assert!(!cut.is_finished());
    disk.heal();
    cut.join().unwrap().unwrap();
    let mut data = [0; 8192];
    device.read_at(8192, &mut data).unwrap();
    assert_eq!(data, [0; 8192]);
}

/// A reset is not a power loss: requests during the reset wait for its end, and then find an empty
/// device.
#[test]
fn requests_during_a_reset_wait_for_its_end() {
    let model = Arc::new(Model::new(1 << 20, 512));
    let device = Power::new(model.clone(), Config::default()).unwrap();
    device.write_at(0, &filled(1, 40), Flags::empty()).unwrap();
    let (tx, rx) = mpsc::channel();
    let submit = |request, buffer| {
        let tx = tx.clone();
        let op = request;
        device.submit(request, buffer, Completion::new(move |outcome, _| tx.send((op, outcome)).unwrap()));
    };
    let write = Request::write(4096, 512);
    device
        .reset(&|| {
            assert_eq!(device.try_io(&write, Buffer::Write(&filled(7, 1))), Ok(TryResult::WouldBlock));
            submit(write, IoBuf::copy_of(&filled(7, 1)).unwrap());
            submit(Request::flush(), IoBuf::empty());
            assert!(rx.try_recv().is_err(), "it did not wait");
            model.write_zeroes(0, model.geometry().size, Flags::empty())
        })
        .unwrap();
    for request in [write, Request::flush()] {
        assert_eq!(rx.recv_timeout(Duration::from_secs(60)), Ok((request, Ok(()))));
    }
    let mut data = vec![1; 40 * 512];
    device.read_at(0, &mut data).unwrap();
    let mut wanted = vec![0; 40 * 512];
    wanted[4096..][..512].copy_from_slice(&filled(7, 1));
    assert!(data == wanted);
    // The cut loses nothing, because all data was flushed.
    device.cut(1).unwrap();
    device.read_at(0, &mut data).unwrap();
    assert!(data == wanted);
}

#[test]
fn reset_clears_cache_and_content() {
    let model = Arc::new(Model::new(BLOCKS * BLOCK, 512));
    let device = Power::new(model.clone(), Config::default()).unwrap();
    device.write_at(0, &filled(1, 50), Flags::empty()).unwrap();
    device.flush().unwrap();
    device.write_at(0, &filled(100, 70), Flags::empty()).unwrap();
    device.reset(&|| model.write_zeroes(0, model.geometry().size, Flags::empty())).unwrap();
    assert_eq!(contents(&device), [0; BLOCKS]);
    assert_eq!(device.unflushed_bytes(), 0);
    assert_eq!(device.reset(&|| Err(Error::Media)), Err(Error::Media));
    device.write_at(0, &filled(1, 5), Flags::empty()).unwrap();
}
