use std::sync::{Barrier, mpsc};
use std::time::Duration;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// Takes a piece until `hold` is dropped.
fn occupied(until: &Arc<std::sync::Mutex<mpsc::Receiver<()>>>) -> Piece {
    let until = Arc::clone(until);
    Box::new(move || {
        let _ = until.lock().unwrap().recv();
    })
}

#[test]
fn workers_work_at_once_and_a_panic_ends_none_of_them() {
    let workers = Workers::new(4);
    let all = Arc::new(Barrier::new(4));
    assert!(workers.offer(Box::new(|| panic!("a panic that the test wants")), true).is_ok());
    for _ in 0..3 {
        let all = Arc::clone(&all);
        let piece = move || {
            all.wait();
        };
        assert!(workers.offer(Box::new(piece), true).is_ok());
    }
    all.wait();
    workers.stop();
}

#[test]
fn beyond_what_may_wait_the_caller_does_it() {
    let workers = Workers::new(2);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    // One that is done, and those that wait.
    assert!((0..PIECES_EACH).all(|_| workers.offer(occupied(&until), false).is_ok()));
    assert!(workers.are_awake() && !workers.has_room());
    let (tell, told) = mpsc::channel();
    let piece = workers.offer(Box::new(move || tell.send(()).unwrap()), true).unwrap_err();
    assert!(told.try_recv().is_err());
    piece();
    assert_eq!(told.try_recv(), Ok(()));
    drop(hold);
    workers.stop();
}

#[test]
fn what_came_first_is_done_first() {
    let workers = Workers::new(2);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    assert!(workers.offer(occupied(&until), false).is_ok());
    let (tell, told) = mpsc::channel();
    for number in 1..PIECES_EACH {
        let tell = tell.clone();
        assert!(workers.offer(Box::new(move || tell.send(number).unwrap()), false).is_ok());
    }
    drop(hold);
    assert!((1..PIECES_EACH).all(|number| told.recv_timeout(PATIENCE) == Ok(number)));
    workers.stop();
}

#[test]
fn readers_that_keep_the_cpus_busy_hand_nothing_on() {
    let workers = Workers::new(3);
    let one = workers.work_beside();
    assert!(workers.has_room(), "there is a CPU for a worker");
    let other = workers.work_beside();
    assert!(!workers.has_room());
    assert!(workers.offer(Box::new(|| ()), true).is_err());
    drop((one, other));
    assert!(workers.has_room());
}

#[test]
fn with_one_cpu_nothing_is_taken() {
    let workers = Workers::new(1);
    assert!(!workers.has_room());
    assert!(workers.offer(Box::new(|| ()), true).is_err());
}

#[test]
fn what_waits_when_they_stop_is_done_and_what_comes_then_is_not_taken() {
    let workers = Workers::new(2);
    let (tell, told) = mpsc::channel();
    for n in 0..2 {
        let tell = tell.clone();
        assert!(workers.offer(Box::new(move || tell.send(n).unwrap()), false).is_ok());
    }
    workers.stop();
    assert!(workers.offer(Box::new(|| ()), false).is_err());
    assert_eq!([0; 2].map(|_| told.recv_timeout(PATIENCE)), [Ok(0), Ok(1)]);
}

#[test]
fn a_piece_behind_a_long_one_is_done_by_another_if_it_is_dear() {
    let workers = Workers::new(3);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    assert!(workers.offer(occupied(&until), false).is_ok());
    let (tell, told) = mpsc::channel();
    assert!(workers.offer(Box::new(move || tell.send(()).unwrap()), true).is_ok());
    assert_eq!(told.recv_timeout(PATIENCE), Ok(()));
    drop(hold);
    workers.stop();
}
