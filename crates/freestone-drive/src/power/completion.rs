//! Detection of threads that are completing requests, which must not wait for completions.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Guard that ends [`inside`], also after a panic.
struct InsideGuard;

impl Drop for InsideGuard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Runs `work`, which completes requests.
pub fn inside<R>(work: impl FnOnce() -> R) -> R {
    DEPTH.set(DEPTH.get() + 1);
    let _guard = InsideGuard;
    work()
}

/// Returns true if the thread is inside of [`inside`].
pub fn is_inside() -> bool {
    DEPTH.get() > 0
}
