//! Tests with a librbd that does not call back: deadlines, retained memory, and dropping the device.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Completion, Device as _, Error, Flags, IoBuf, Request};
use freestone_rbd::{Config, Rbd};

use crate::harness::{Cluster, wait_for};

const SIZE: u64 = 8 << 20;
const SHORT: Duration = Duration::from_secs(1);

fn short(cluster: &Cluster) -> Config {
    Config { timeout: SHORT, ..cluster.config() }
}

#[test]
fn hanging_request_times_out_without_blocking_others() {
    let cluster = Cluster::new(SIZE);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang write\n");
    let began = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| sender.send((outcome, buffer.len())).unwrap());
    device.submit(Request::write(0, 4096), IoBuf::copy_of(&[1; 4096]).unwrap(), done);
    device.read_at(8192, &mut [0; 4096]).unwrap();
    device.flush().unwrap();
    assert!(receiver.try_recv().is_err());
    // librbd keeps the buffer until it calls back, so the request completes with an empty buffer.
    assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok((Err(Error::Media), 0)));
    assert!(began.elapsed() >= SHORT);
    assert_eq!(
        device.last_error().unwrap(),
        "a write of 4096 bytes at 0: the cluster did not answer in time"
    );
    // librbd applies the write later, with the original content of the buffer.
    cluster.control("");
    wait_for("it is written", || cluster.operations().contains(&"write 0 4096 0".to_owned()));
    device.write_at(0, &[2; 512], Flags::FUA).unwrap();
    let mut data = [0; 4096];
    device.read_at(0, &mut data).unwrap();
    assert!(data[..512] == [2; 512] && data[512..] == [1; 3584]);
}

#[test]
fn hanging_extent_query_times_out() {
    let cluster = Cluster::new(SIZE);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang diff\n");
    assert_eq!(device.extents(0, SIZE, &mut |_| true), Err(Error::Media));
    cluster.control("");
    wait_for("it is answered again", || device.extents(0, SIZE, &mut |_| true) == Ok(SIZE));
}

/// librbd retains the memory of timed-out requests. Above a limit of that memory, new requests fail.
#[test]
fn memory_of_timed_out_requests_is_limited() {
    let cluster = Cluster::new(64 << 20);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang read\n");
    let (sender, receiver) = mpsc::channel();
    let submit = |len: u64| {
        let sender = sender.clone();
        let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap());
        device.submit(Request::read(0, len), IoBuf::zeroed(len as usize).unwrap(), done);
    };
    (0..16).for_each(|_| submit(16 << 20));
    for _ in 0..16 {
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(Err(Error::Media)));
    }
    // The request fails at once, without waiting for a timeout.
    submit(512);
    assert_eq!(receiver.try_recv(), Ok(Err(Error::Media)));
    cluster.control("");
    wait_for("it goes on", || device.read_at(0, &mut [0; 512]).is_ok());
}

#[test]
fn drop_fails_requests_and_closes_image_later() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    cluster.control("hang write\n");
    let (sender, receiver) = mpsc::channel();
    let done = Completion::new(move |outcome, _| sender.send(outcome).unwrap());
    device.submit(Request::write(0, 4096).with(Flags::FUA), IoBuf::copy_of(&[1; 4096]).unwrap(), done);
    let began = Instant::now();
    drop(device);
    assert_eq!(receiver.try_recv(), Ok(Err(Error::Gone)));
    assert!(began.elapsed() < Duration::from_secs(15));
    assert!(!cluster.log().contains(&"closed".to_owned()));
    cluster.control("");
    wait_for("it is closed", || cluster.log().last().is_some_and(|line| line == "shutdown"));
    // After the drop, the flush that the FUA flag requires is not issued.
    assert_eq!(cluster.operations(), ["write 0 4096 0"]);
}

#[test]
fn hanging_close_does_not_block_drop() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    cluster.control("hang close\n");
    let began = Instant::now();
    drop(device);
    assert!(began.elapsed() < Duration::from_secs(15));
    cluster.control("");
    wait_for("it is closed", || cluster.log().contains(&"closed".to_owned()));
}

/// A librbd thread drops the last reference to the device, and must not wait for itself.
#[test]
fn completion_may_drop_device() {
    let cluster = Cluster::new(SIZE);
    let device = std::sync::Arc::new(cluster.open());
    let (own, (sender, receiver)) = (std::sync::Arc::clone(&device), mpsc::channel());
    let done = Completion::new(move |outcome, _| {
        let began = Instant::now();
        drop(own);
        sender.send((outcome, began.elapsed())).unwrap();
    });
    cluster.control("hang read\n");
    device.submit(Request::read(0, 512), IoBuf::zeroed(512).unwrap(), done);
    drop(device);
    cluster.control("");
    let (outcome, took) = receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(outcome == Ok(()) && took < Duration::from_secs(2), "{outcome:?} {took:?}");
    wait_for("it is closed", || cluster.log().contains(&"closed".to_owned()));
}

#[test]
fn hanging_open_times_out_and_closes_later() {
    // Each open waits for its timeout, so the three opens run concurrently.
    thread::scope(|scope| {
        for call in ["connect", "open", "stat"] {
            scope.spawn(move || {
                let cluster = Cluster::new(SIZE);
                cluster.control(&format!("hang {call}\n"));
                let why = Rbd::open(&short(&cluster)).unwrap_err().to_string();
                assert_eq!(why, "rbd/vm: the cluster did not answer within 3s");
                cluster.control("");
                wait_for("it is closed", || cluster.log().last().is_some_and(|line| line == "shutdown"));
            });
        }
    });
}
