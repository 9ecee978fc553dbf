//! Releases the unused part of a thread's stack, which deeper calls have touched, to the kernel before the
//! thread sleeps.
#![expect(unsafe_code)]
// UNSAFETY: asks for the bounds of the thread's stack, and discards pages that no frame uses.

use std::hint::black_box;
use std::mem::MaybeUninit;

use rustix::mm::{Advice, madvise};

use crate::PAGE_BYTES;

/// Stack space in bytes that calls made by `release_unused_stack` may need below its own frame.
const BELOW_BYTES: usize = PAGE_BYTES;

/// Releases the unused stack pages of the calling thread to the kernel. Does nothing if the bounds of the
/// stack are unknown.
#[inline(never)]
pub fn release_unused_stack() {
    let here = 0_u8;
    let here = black_box(&raw const here).addr();
    let Some(low) = lowest_usable() else { return };
    let end = (here - BELOW_BYTES) & !(PAGE_BYTES - 1);
    let low = low.next_multiple_of(PAGE_BYTES);
    if low < end {
        // SAFETY: the pages reach from the stack's lowest byte to well below this frame. The stack grows
        // downwards, so no frame of this thread uses them, nor do calls from here, and no other thread does.
        // Later frames write before they read.
        let _ = unsafe { madvise(low as *mut _, end - low, Advice::LinuxDontNeed) };
    }
}

/// Returns the lowest usable address of the calling thread's stack, or `None` for the main thread, whose
/// stack grows, or if the bounds are unknown.
fn lowest_usable() -> Option<usize> {
    if rustix::thread::gettid() == rustix::process::getpid() {
        return None;
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the pointer is to a whole `pthread_attr_t`, which the call fills on success.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) } != 0 {
        return None;
    }
    let (mut low, mut bytes, mut guard) = (std::ptr::null_mut(), 0, 0);
    let attributes = attributes.as_mut_ptr();
    // SAFETY: filled by the call above, and destroyed once.
    let is_known = unsafe {
        let is_known = libc::pthread_attr_getstack(attributes, &raw mut low, &raw mut bytes) == 0
            && libc::pthread_attr_getguardsize(attributes, &raw mut guard) == 0;
        libc::pthread_attr_destroy(attributes);
        is_known
    };
    is_known.then_some(low.addr() + guard)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Touches `levels` stack frames of 4 KiB. The result depends on every frame, so that the compiler
    /// removes none.
    #[inline(never)]
    fn touch_stack(levels: usize) -> usize {
        let block = black_box([levels as u8; 4096]);
        let sum: usize = block.iter().map(|byte| usize::from(*byte)).sum();
        if levels == 0 { sum } else { sum + touch_stack(levels - 1) }
    }

    /// Returns the number of resident pages of the calling thread's stack below this frame. Counts the stack
    /// only, because other tests of the process use memory, too.
    #[inline(never)]
    fn resident_pages() -> usize {
        let here = 0_u8;
        let low = lowest_usable().unwrap().next_multiple_of(PAGE_BYTES);
        let pages = (black_box(&raw const here).addr() - low) / PAGE_BYTES;
        let mut states = vec![0_u8; pages];
        // SAFETY: only queries, and writes one byte for each page into a buffer of that size.
        let outcome = unsafe { libc::mincore(low as *mut _, pages * PAGE_BYTES, states.as_mut_ptr()) };
        assert_eq!(outcome, 0);
        states.iter().filter(|state| **state & 1 != 0).count()
    }

    #[test]
    fn release_unused_stack_frees_pages_for_reuse() {
        let (before, after) = std::thread::spawn(|| {
            let first = touch_stack(200);
            let before = resident_pages();
            release_unused_stack();
            let after = resident_pages();
            assert_eq!(touch_stack(200), first);
            (before, after)
        })
        .join()
        .unwrap();
        assert!(before >= 200, "{before} pages");
        assert!(after <= 8, "{after} pages of {before}");
    }
}
