//! The stack of a thread that sleeps for long: the part below, which deeper calls have touched, goes
//! back to the kernel.
#![expect(unsafe_code)]
// UNSAFETY: asks where the thread's stack lies, and gives pages of it back that no frame is in.

use std::hint::black_box;
use std::mem::MaybeUninit;

use rustix::mm::{Advice, madvise};

use crate::PAGE_BYTES;

/// What the calls of this function itself may need, below its own frame.
const BELOW_BYTES: usize = PAGE_BYTES;

/// Gives back what the calling thread does not use of its stack at this moment. Where that cannot be
/// found out, nothing.
#[inline(never)]
pub fn give_back_unused() {
    let here = 0_u8;
    let here = black_box(&raw const here).addr();
    let Some(low) = lowest() else { return };
    let end = (here - BELOW_BYTES) & !(PAGE_BYTES - 1);
    let low = low.next_multiple_of(PAGE_BYTES);
    if low < end {
        // SAFETY: the pages from the stack's lowest byte to well below this frame. It grows
        // downwards, so no frame of this thread is there, and no other thread uses it; what is
        // called from here stays above. A later frame there writes before it reads.
        let _ = unsafe { madvise(low as *mut _, end - low, Advice::LinuxDontNeed) };
    }
}

/// The lowest byte of the calling thread's stack that may be used; `None` for the first thread,
/// whose stack grows.
fn lowest() -> Option<usize> {
    if rustix::thread::gettid() == rustix::process::getpid() {
        return None;
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the pointer is to a whole `pthread_attr_t`, which the call fills where it succeeds.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) } != 0 {
        return None;
    }
    let (mut low, mut bytes, mut guard) = (std::ptr::null_mut(), 0, 0);
    let attributes = attributes.as_mut_ptr();
    // SAFETY: filled by the call above, and destroyed once.
    let known = unsafe {
        let known = libc::pthread_attr_getstack(attributes, &raw mut low, &raw mut bytes) == 0
            && libc::pthread_attr_getguardsize(attributes, &raw mut guard) == 0;
        libc::pthread_attr_destroy(attributes);
        known
    };
    known.then_some(low.addr() + guard)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Touches much of the stack; the result depends on all of it.
    #[inline(never)]
    fn deep(levels: usize) -> usize {
        let block = black_box([levels as u8; 4096]);
        let sum: usize = block.iter().map(|byte| usize::from(*byte)).sum();
        if levels == 0 { sum } else { sum + deep(levels - 1) }
    }

    /// Pages of the calling thread's stack that have memory, from the lowest to the one of this
    /// frame. Of the stack alone: other tests of the process have memory of their own.
    #[inline(never)]
    fn resident() -> usize {
        let here = 0_u8;
        let low = lowest().unwrap().next_multiple_of(PAGE_BYTES);
        let pages = (black_box(&raw const here).addr() - low) / PAGE_BYTES;
        let mut states = vec![0_u8; pages];
        // SAFETY: asks only, and writes a byte for each page into a buffer that has them.
        let outcome = unsafe { libc::mincore(low as *mut _, pages * PAGE_BYTES, states.as_mut_ptr()) };
        assert_eq!(outcome, 0);
        states.iter().filter(|state| **state & 1 != 0).count()
    }

    #[test]
    fn what_deeper_calls_touched_is_given_back_and_can_be_used_again() {
        let (before, after) = std::thread::spawn(|| {
            let first = deep(200);
            let before = resident();
            give_back_unused();
            let after = resident();
            assert_eq!(deep(200), first);
            (before, after)
        })
        .join()
        .unwrap();
        assert!(before >= 200, "{before} pages");
        assert!(after <= 8, "{after} pages of {before}");
    }
}
