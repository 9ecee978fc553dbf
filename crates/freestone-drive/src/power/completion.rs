//! Detects threads that are running a completion, since these must not wait for other completions.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Guard that decrements the depth at the end of [`inside`], also after a panic.
struct InsideGuard;

impl Drop for InsideGuard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Runs `work`, which completes requests, and marks the thread as being in a completion meanwhile.
pub fn inside<R>(work: impl FnOnce() -> R) -> R {
    DEPTH.set(DEPTH.get() + 1);
    let _guard = InsideGuard;
    work()
}

/// Returns true if the current thread is running a completion: it is in the `work` of [`inside`].
pub fn is_inside() -> bool {
    DEPTH.get() > 0
}
