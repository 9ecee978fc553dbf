//! loom models of the worker pool: tasks are offered while workers fall asleep and while they exit.

use loom::thread;

use super::Workers;
use crate::sync::{Arc, AtomicU32, Ordering};

/// Offers a task that increments `done`, and runs the task itself if the pool rejects it.
fn offer_or_run(workers: &Workers, done: &Arc<AtomicU32>) {
    let count = Arc::clone(done);
    let task = Box::new(move || {
        // Relaxed: the counter is read after all threads have ended.
        count.fetch_add(1, Ordering::Relaxed);
    });
    if let Err(task) = workers.offer(task, false) {
        task();
    }
}

fn run(workers: &Workers) -> thread::JoinHandle<()> {
    let workers = workers.clone();
    thread::spawn(move || workers.run())
}

#[test]
fn tasks_of_two_readers_run_once() {
    loom::model(|| {
        let (workers, done) = (Workers::started(1), Arc::new(AtomicU32::new(0)));
        let worker = run(&workers);
        let (hands, counts) = (workers.clone(), Arc::clone(&done));
        let other = thread::spawn(move || offer_or_run(&hands, &counts));
        offer_or_run(&workers, &done);
        other.join().unwrap();
        workers.stop();
        worker.join().unwrap();
        // Relaxed: all threads have ended.
        assert_eq!(done.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn task_offered_during_stop_runs_once() {
    loom::model(|| {
        let (workers, done) = (Workers::started(1), Arc::new(AtomicU32::new(0)));
        let worker = run(&workers);
        let stops = workers.clone();
        let stop = thread::spawn(move || stops.stop());
        offer_or_run(&workers, &done);
        stop.join().unwrap();
        worker.join().unwrap();
        // Relaxed: all threads have ended.
        assert_eq!(done.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn two_workers_run_two_tasks() {
    let mut model = loom::model::Builder::new();
    // A higher bound would take minutes.
    model.preemption_bound = Some(2);
    model.check(|| {
        let (workers, done) = (Workers::started(2), Arc::new(AtomicU32::new(0)));
        let both = [run(&workers), run(&workers)];
        offer_or_run(&workers, &done);
        offer_or_run(&workers, &done);
        workers.stop();
        for worker in both {
            worker.join().unwrap();
        }
        // Relaxed: all threads have ended.
        assert_eq!(done.load(Ordering::Relaxed), 2);
    });
}
