//! A library that does not answer: deadlines, the memory that it still has, the end of a device.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Completion, Device as _, Error, Flags, IoBuf, Request};
use freestone_rbd::{Config, Rbd};

use crate::harness::{Cluster, soon};

const SIZE: u64 = 8 << 20;
const SHORT: Duration = Duration::from_secs(1);

fn short(cluster: &Cluster) -> Config {
    Config { timeout: SHORT, ..cluster.config() }
}

#[test]
fn a_request_that_hangs_fails_in_time_and_others_do_not_wait_for_it() {
    let cluster = Cluster::new(SIZE);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang write\n");
    let began = Instant::now();
    let (tell, told) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| tell.send((outcome, buffer.len())).unwrap());
    device.submit(Request::write(0, 4096), IoBuf::copy_of(&[1; 4096]).unwrap(), done);
    device.read_at(8192, &mut [0; 4096]).unwrap();
    device.flush().unwrap();
    assert!(told.try_recv().is_err());
    // Its buffer is the library's until that calls back.
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((Err(Error::Media), 0)));
    assert!(began.elapsed() >= SHORT);
    assert_eq!(
        device.last_error().unwrap(),
        "a write of 4096 bytes at 0: the cluster did not answer in time"
    );
    // It is carried out after all, with what was in the buffer.
    cluster.control("");
    soon("it is written", || cluster.did().contains(&"write 0 4096 0".to_owned()));
    device.write_at(0, &[2; 512], Flags::FUA).unwrap();
    let mut data = [0; 4096];
    device.read_at(0, &mut data).unwrap();
    assert!(data[..512] == [2; 512] && data[512..] == [1; 3584]);
}

#[test]
fn so_does_the_question_after_holes() {
    let cluster = Cluster::new(SIZE);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang diff\n");
    assert_eq!(device.extents(0, SIZE, &mut |_| true), Err(Error::Media));
    cluster.control("");
    soon("it is answered again", || device.extents(0, SIZE, &mut |_| true) == Ok(SIZE));
}

/// The library has memory of what was given up. With too much of it, nothing new is begun.
#[test]
fn what_the_library_keeps_has_a_bound() {
    let cluster = Cluster::new(64 << 20);
    let device = Rbd::open(&short(&cluster)).unwrap();
    cluster.control("hang read\n");
    let (tell, told) = mpsc::channel();
    let submit = |len: u64| {
        let tell = tell.clone();
        let done = Completion::new(move |outcome, _| tell.send(outcome).unwrap());
        device.submit(Request::read(0, len), IoBuf::zeroed(len as usize).unwrap(), done);
    };
    (0..16).for_each(|_| submit(16 << 20));
    for _ in 0..16 {
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Err(Error::Media)));
    }
    // At once.
    submit(512);
    assert_eq!(told.try_recv(), Ok(Err(Error::Media)));
    cluster.control("");
    soon("it goes on", || device.read_at(0, &mut [0; 512]).is_ok());
}

#[test]
fn what_is_under_way_is_answered_when_the_device_ends_and_the_image_is_closed_later() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    cluster.control("hang write\n");
    let (tell, told) = mpsc::channel();
    let done = Completion::new(move |outcome, _| tell.send(outcome).unwrap());
    device.submit(Request::write(0, 4096).with(Flags::FUA), IoBuf::copy_of(&[1; 4096]).unwrap(), done);
    let began = Instant::now();
    drop(device);
    assert_eq!(told.try_recv(), Ok(Err(Error::Gone)));
    assert!(began.elapsed() < Duration::from_secs(15));
    assert!(!cluster.log().contains(&"closed".to_owned()));
    cluster.control("");
    soon("it is closed", || cluster.log().last().is_some_and(|line| line == "shutdown"));
    // Nothing more of the request.
    assert_eq!(cluster.did(), ["write 0 4096 0"]);
}

#[test]
fn a_close_that_hangs_does_not_hold_up_the_end() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    cluster.control("hang close\n");
    let began = Instant::now();
    drop(device);
    assert!(began.elapsed() < Duration::from_secs(15));
    cluster.control("");
    soon("it is closed", || cluster.log().contains(&"closed".to_owned()));
}

/// The last reference is dropped on a thread of the library, which must not wait for itself.
#[test]
fn a_completion_may_drop_the_device() {
    let cluster = Cluster::new(SIZE);
    let device = std::sync::Arc::new(cluster.open());
    let (own, (tell, told)) = (std::sync::Arc::clone(&device), mpsc::channel());
    let done = Completion::new(move |outcome, _| {
        let began = Instant::now();
        drop(own);
        tell.send((outcome, began.elapsed())).unwrap();
    });
    cluster.control("hang read\n");
    device.submit(Request::read(0, 512), IoBuf::zeroed(512).unwrap(), done);
    drop(device);
    cluster.control("");
    let (outcome, took) = told.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(outcome == Ok(()) && took < Duration::from_secs(2), "{outcome:?} {took:?}");
    soon("it is closed", || cluster.log().contains(&"closed".to_owned()));
}

#[test]
fn a_cluster_that_hangs_is_given_up_and_closed_when_it_answers() {
    // Each waits for its timeout, so they run at the same time.
    thread::scope(|scope| {
        for call in ["connect", "open", "stat"] {
            scope.spawn(move || {
                let cluster = Cluster::new(SIZE);
                cluster.control(&format!("hang {call}\n"));
                let why = Rbd::open(&short(&cluster)).unwrap_err().to_string();
                assert_eq!(why, "rbd/vm: the cluster did not answer within 3s");
                cluster.control("");
                soon("it is closed", || cluster.log().last().is_some_and(|line| line == "shutdown"));
            });
        }
    });
}
