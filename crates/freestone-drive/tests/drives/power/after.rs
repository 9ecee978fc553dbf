//! Power cuts that a device triggers itself after a number of writes or flushes.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone_core::device::{
    Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, TryResult,
};
use freestone_drive::power::{Config, CutTrigger, Power};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

use crate::power::model::filled;

const SIZE: usize = 1 << 20;
const SOON: Duration = Duration::from_secs(60);

/// Writes and flushes until the power is cut. Returns the content after the cut and the number of completed
/// requests.
fn run(after: CutTrigger, seed: u64) -> (Vec<u8>, u64) {
    let device = Power::new(Arc::new(Model::new(SIZE, 512)), Config::default()).unwrap();
    let (off, went_off) = mpsc::channel();
    device.cut_after(after, move || off.send(()).unwrap()).unwrap();
    let mut answered = 0;
    while went_off.try_recv().is_err() {
        match answered % 10 {
            9 => device.flush(),
            4 => device.write_zeroes(answered * 512, 1024, Flags::empty()),
            _ => device.write_at(answered * 512, &filled(answered + 1, 5), Flags::empty()),
        }
        .unwrap();
        answered += 1;
    }
    assert_eq!(device.pending_cut(), None);
    device.cut(seed).unwrap();
    let mut data = vec![0; SIZE];
    device.read_at(0, &mut data).unwrap();
    (data, answered)
}

#[test]
fn cut_after_n_requests_depends_on_the_seed() {
    // Each tenth request is a flush, the others are writes.
    for (after, answered) in [
        (CutTrigger::Writes(1), 1),
        (CutTrigger::Writes(25), 27),
        (CutTrigger::Flushes(3), 30),
        (CutTrigger::Flushes(1), 10),
    ] {
        let (data, count) = run(after, 5);
        assert_eq!(count, answered, "{after:?}");
        assert_eq!(run(after, 5).0, data, "{after:?}: the same seed leaves the same");
        let others: Vec<_> = (0..8).map(|seed| run(after, seed).0).collect();
        let flushed = matches!(after, CutTrigger::Flushes(_));
        assert_eq!(others.iter().all(|other| *other == data), flushed, "{after:?}");
    }
}

#[test]
fn requests_after_the_last_one_fail_after_the_cut() {
    let disk = Arc::new(FaultyDisk::new(SIZE, 512));
    let device = Arc::new(Power::new(disk.clone(), Config::default()).unwrap());
    let (off, went_off) = mpsc::channel();
    device.cut_after(CutTrigger::Flushes(1), move || off.send(()).unwrap()).unwrap();
    device.write_at(0, &filled(1, 8), Flags::empty()).unwrap();
    assert_eq!(device.pending_cut(), Some(CutTrigger::Flushes(1)));
    disk.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Hang);
    let (tx, rx) = mpsc::channel();
    let submit = |request: Request, buffer| {
        let tx = tx.clone();
        device.submit(
            request,
            buffer,
            Completion::new(move |outcome, _| tx.send((request, outcome)).unwrap()),
        );
    };
    submit(Request::flush(), IoBuf::empty());
    disk.wait_held(1);
    let write = Request::write(8192, 512);
    assert_eq!(device.try_io(&write, Buffer::Write(&filled(9, 1))), Ok(TryResult::WouldBlock));
    submit(write, IoBuf::copy_of(&filled(9, 1)).unwrap());
    assert!(went_off.try_recv().is_err(), "the last one is not answered yet");
    disk.heal();
    assert_eq!(rx.recv_timeout(SOON), Ok((Request::flush(), Ok(()))));
    went_off.recv_timeout(SOON).unwrap();
    submit(Request::read(0, 512), IoBuf::zeroed(512).unwrap());
    assert!(rx.try_recv().is_err(), "nothing is answered");
    assert_eq!(device.cut_after(CutTrigger::Writes(1), || {}), Err(Error::Gone));
    let cut = device.cut(1).unwrap();
    assert_eq!((cut.kept_blocks, cut.lost_blocks), (0, 0), "all is flushed, or was not done");
    let gone: Vec<_> = (0..2).map(|_| rx.recv_timeout(SOON).unwrap().1).collect();
    assert_eq!(gone, [Err(Error::Gone); 2]);
    device.write_at(0, &filled(1, 1), Flags::empty()).unwrap();
}

#[test]
fn failed_requests_do_not_count_for_a_pending_cut() {
    let disk = Arc::new(FaultyDisk::new(SIZE, 512));
    let device = Arc::new(Power::new(disk.clone(), Config::default()).unwrap());
    let (off, went_off) = mpsc::channel();
    device.cut_after(CutTrigger::Writes(2), move || off.send(()).unwrap()).unwrap();
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    device.write_at(0, &filled(1, 1), Flags::FUA).unwrap_err();
    assert_eq!(device.pending_cut(), Some(CutTrigger::Writes(2)));
    disk.heal();
    device.write_at(0, &filled(1, 1), Flags::FUA).unwrap();
    assert_eq!(device.pending_cut(), Some(CutTrigger::Writes(1)));
    // A new pending cut cancels the previous one.
    device.cut_after(CutTrigger::Writes(1), || {}).unwrap();
    assert!(went_off.recv().is_err());
    device.write_at(512, &filled(2, 1), Flags::empty()).unwrap();
    let reader = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.read_at(512, &mut [0; 512]))
    };
    thread::sleep(Duration::from_millis(20));
    assert!(!reader.is_finished());
    device.cancel_cut();
    assert_eq!(reader.join().unwrap(), Ok(()));
    // If a pending cut never happens, dropping the device fails waiting requests and writes unflushed data to
    // the disk.
    device.cut_after(CutTrigger::Writes(1), || {}).unwrap();
    device.write_at(0, &filled(3, 1), Flags::empty()).unwrap();
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
    device.submit(Request::flush(), IoBuf::empty(), done);
    drop(device);
    assert_eq!(rx.recv_timeout(SOON), Ok(Err(Error::Gone)));
    let mut data = [0; 512];
    disk.read_at(0, &mut data).unwrap();
    assert_eq!(data[..], filled(3, 1));
}
