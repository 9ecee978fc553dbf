//! Parallel loop over a range of numbers.

use crate::rt::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use freestone_core::sync::Mutex;
use std::thread;

/// Calls `work` for each number below `count`, on up to `threads` threads, roughly in ascending order. After
/// the first error, no further call starts.
///
/// # Errors
/// The first error of `work`.
pub fn for_each<E: Send>(
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, failed, error) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
    let run = || {
        while !failed.load(Ordering::SeqCst) {
            let number = next.fetch_add(1, Ordering::SeqCst);
            if number >= count {
                return;
            }
            if let Err(why) = work(number) {
                failed.store(true, Ordering::SeqCst);
                error.lock().get_or_insert(why);
            }
        }
    };
    thread::scope(|scope| {
        // A simulation cannot schedule scoped threads, so the loop then runs on the calling thread only.
        let threads = if cfg!(freestone_sim) { 1 } else { threads };
        // The calling thread works too, so the loop finishes even if no thread can be spawned.
        for _ in 1..threads.min(count) {
            if thread::Builder::new().name("push".into()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    error.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_each_visits_all_and_stops_after_error() {
        let sum = AtomicUsize::new(0);
        let add = |number| {
            sum.fetch_add(number, Ordering::SeqCst);
            Ok::<(), ()>(())
        };
        for_each(8, 1000, add).unwrap();
        for_each(8, 0, add).unwrap();
        assert_eq!(sum.load(Ordering::SeqCst), 499_500);
        let done = AtomicUsize::new(0);
        let failing = |number| {
            done.fetch_add(1, Ordering::SeqCst);
            if number >= 10 { Err(number) } else { Ok(()) }
        };
        assert!(for_each(4, 1_000_000, failing).unwrap_err() < 100);
        assert!(done.load(Ordering::SeqCst) < 1000);
    }
}
