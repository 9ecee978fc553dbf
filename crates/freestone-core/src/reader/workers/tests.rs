use std::sync::{Barrier, mpsc};
use std::time::Duration;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a task that blocks until the sender of `until` is dropped.
fn blocking_task(until: &Arc<std::sync::Mutex<mpsc::Receiver<()>>>) -> Task {
    let until = Arc::clone(until);
    Box::new(move || {
        let _ = until.lock().unwrap().recv();
    })
}

#[test]
fn workers_run_concurrently_despite_panic() {
    let workers = Workers::new(4);
    let all = Arc::new(Barrier::new(4));
    assert!(workers.offer(Box::new(|| panic!("a panic that the test wants")), true).is_ok());
    for _ in 0..3 {
        let all = Arc::clone(&all);
        let task = move || {
            all.wait();
        };
        assert!(workers.offer(Box::new(task), true).is_ok());
    }
    all.wait();
    workers.stop();
}

#[test]
fn full_pool_returns_task_to_caller() {
    let workers = Workers::new(2);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    // The pool accepts a running task and its limit of queued tasks.
    assert!((0..TASKS_EACH).all(|_| workers.offer(blocking_task(&until), false).is_ok()));
    assert!(workers.has_awake_worker() && !workers.has_capacity());
    let (tx, rx) = mpsc::channel();
    let task = workers.offer(Box::new(move || tx.send(()).unwrap()), true).unwrap_err();
    assert!(rx.try_recv().is_err());
    task();
    assert_eq!(rx.try_recv(), Ok(()));
    drop(hold);
    workers.stop();
}

#[test]
fn tasks_run_in_order() {
    let workers = Workers::new(2);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    assert!(workers.offer(blocking_task(&until), false).is_ok());
    let (tx, rx) = mpsc::channel();
    for number in 1..TASKS_EACH {
        let tx = tx.clone();
        assert!(workers.offer(Box::new(move || tx.send(number).unwrap()), false).is_ok());
    }
    drop(hold);
    assert!((1..TASKS_EACH).all(|number| rx.recv_timeout(PATIENCE) == Ok(number)));
    workers.stop();
}

#[test]
fn busy_readers_leave_no_room_for_tasks() {
    let workers = Workers::new(3);
    let one = workers.register_busy_reader();
    assert!(workers.has_capacity(), "there is a CPU for a worker");
    let other = workers.register_busy_reader();
    assert!(!workers.has_capacity());
    assert!(workers.offer(Box::new(|| ()), true).is_err());
    drop((one, other));
    assert!(workers.has_capacity());
}

#[test]
fn single_cpu_pool_rejects_tasks() {
    let workers = Workers::new(1);
    assert!(!workers.has_capacity());
    assert!(workers.offer(Box::new(|| ()), true).is_err());
}

#[test]
fn stop_runs_queued_tasks_and_rejects_later_ones() {
    let workers = Workers::new(2);
    let (tx, rx) = mpsc::channel();
    for n in 0..2 {
        let tx = tx.clone();
        assert!(workers.offer(Box::new(move || tx.send(n).unwrap()), false).is_ok());
    }
    workers.stop();
    assert!(workers.offer(Box::new(|| ()), false).is_err());
    assert_eq!([0; 2].map(|_| rx.recv_timeout(PATIENCE)), [Ok(0), Ok(1)]);
}

#[test]
fn expensive_task_wakes_second_worker() {
    let workers = Workers::new(3);
    let (hold, until) = mpsc::channel::<()>();
    let until = Arc::new(std::sync::Mutex::new(until));
    assert!(workers.offer(blocking_task(&until), false).is_ok());
    let (tx, rx) = mpsc::channel();
    assert!(workers.offer(Box::new(move || tx.send(()).unwrap()), true).is_ok());
    assert_eq!(rx.recv_timeout(PATIENCE), Ok(()));
    drop(hold);
    workers.stop();
}
