//! loom models: pieces are handed on while workers fall asleep, and while they end.

use loom::thread;

use super::Workers;
use crate::sync::{Arc, AtomicU32, Ordering};

/// Hands a piece on that counts itself, or does it.
fn give(workers: &Workers, done: &Arc<AtomicU32>) {
    let count = Arc::clone(done);
    let piece = Box::new(move || {
        // Relaxed: read when all threads have ended.
        count.fetch_add(1, Ordering::Relaxed);
    });
    if let Err(piece) = workers.offer(piece, false) {
        piece();
    }
}

fn run(workers: &Workers) -> thread::JoinHandle<()> {
    let workers = workers.clone();
    thread::spawn(move || workers.run())
}

#[test]
fn what_two_readers_hand_on_is_done_once() {
    loom::model(|| {
        let (workers, done) = (Workers::started(1), Arc::new(AtomicU32::new(0)));
        let worker = run(&workers);
        let (hands, counts) = (workers.clone(), Arc::clone(&done));
        let other = thread::spawn(move || give(&hands, &counts));
        give(&workers, &done);
        other.join().unwrap();
        workers.stop();
        worker.join().unwrap();
        // Relaxed: as above.
        assert_eq!(done.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn what_comes_while_the_workers_end_is_done_once() {
    loom::model(|| {
        let (workers, done) = (Workers::started(1), Arc::new(AtomicU32::new(0)));
        let worker = run(&workers);
        let stops = workers.clone();
        let stop = thread::spawn(move || stops.stop());
        give(&workers, &done);
        stop.join().unwrap();
        worker.join().unwrap();
        // Relaxed: as above.
        assert_eq!(done.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn two_workers_take_two_pieces() {
    let mut model = loom::model::Builder::new();
    // With more it takes minutes.
    model.preemption_bound = Some(2);
    model.check(|| {
        let (workers, done) = (Workers::started(2), Arc::new(AtomicU32::new(0)));
        let both = [run(&workers), run(&workers)];
        give(&workers, &done);
        give(&workers, &done);
        workers.stop();
        for worker in both {
            worker.join().unwrap();
        }
        // Relaxed: as above.
        assert_eq!(done.load(Ordering::Relaxed), 2);
    });
}
