//! Whether the calling thread is answering requests: what it drops then must not wait for answers.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Ends what [`inside`] began, also where that panics.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Runs `work`, which answers requests.
pub fn inside<R>(work: impl FnOnce() -> R) -> R {
    DEPTH.set(DEPTH.get() + 1);
    let _leave = Leave;
    work()
}

/// Whether the thread is inside of [`inside`].
pub fn is_inside() -> bool {
    DEPTH.get() > 0
}
