//! Plugs, which batch requests as in the kernel's block layer (`struct blk_plug`).
//!
//! A thread starts a [`Plug`] before it submits several requests. Devices that can submit many requests at
//! once hold them and are called when the plug is released. So a batch passes through all layers, which need
//! not know about it. A thread that completes several requests uses a plug in the same way, so that each
//! receiver of completions is woken once.
//!
//! A plugged thread must [`flush`] before it waits for its own requests.

use std::cell::RefCell;
use std::marker::PhantomData;

use crate::sync::{Arc, thread_local};

/// A device that can hold requests, or a queue that can hold completions, of plugged threads.
pub trait Unplug: Send + Sync {
    /// Submits the held requests, or delivers the held completions, because the plug is released.
    fn unplug(&self);
}

/// Devices and queues to call when the plug is released; `None` if the thread has no plug.
type Holders = Option<Vec<Arc<dyn Unplug>>>;

thread_local! {
    static HOLDERS: RefCell<Holders> = const { RefCell::new(None) };
}

/// Batches the requests and completions of its thread until dropped. A nested plug has no effect.
#[derive(Debug)]
pub struct Plug {
    is_outer: bool,
    /// Plugs belong to one thread, so they are neither Send nor Sync.
    thread: PhantomData<*const ()>,
}

impl Plug {
    /// Plugs the calling thread.
    pub fn start() -> Self {
        let is_outer = HOLDERS.with_borrow_mut(|held| {
            let is_outer = held.is_none();
            held.get_or_insert_default();
            is_outer
        });
        Self { is_outer, thread: PhantomData }
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        if self.is_outer {
            // The thread has no plug any more, so requests that `unplug` submits are not held.
            for holder in HOLDERS.take().into_iter().flatten() {
                holder.unplug();
            }
        }
    }
}

/// Submits the requests and completions held for the thread; the plug remains. Called before the thread waits
/// for something that may be held, as the kernel does before a task sleeps.
pub fn flush() {
    let take = || HOLDERS.with_borrow_mut(|holders| holders.as_mut().map_or(Vec::new(), std::mem::take));
    // Requests that `unplug` submits may be held again.
    loop {
        let holders = take();
        if holders.is_empty() {
            return;
        }
        for holder in holders {
            holder.unplug();
        }
    }
}

/// Returns true if the thread has a plug, and registers `holder` to be called when the plug is released.
pub fn hold<T: Unplug + 'static>(holder: &Arc<T>) -> bool {
    HOLDERS.with_borrow_mut(|held| {
        let Some(holders) = held else { return false };
        let address = Arc::as_ptr(holder).cast::<()>();
        // The list is short: one holder for each device and queue of the batch.
        if !holders.iter().any(|known| Arc::as_ptr(known).cast::<()>() == address) {
            holders.push(Arc::clone(holder) as Arc<dyn Unplug>);
        }
        true
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Counts(AtomicU32);

    impl Unplug for Counts {
        fn unplug(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn outer_plug_release_unplugs_each_holder_once() {
        let (one, other) = (Arc::new(Counts::default()), Arc::new(Counts::default()));
        let unplugs = || (one.0.load(Ordering::SeqCst), other.0.load(Ordering::SeqCst));
        assert!(!hold(&one));
        let plug = Plug::start();
        {
            let _inner = Plug::start();
            assert!(hold(&one) && hold(&other) && hold(&one));
        }
        assert_eq!(unplugs(), (0, 0));
        flush();
        assert_eq!(unplugs(), (1, 1));
        flush();
        assert_eq!(unplugs(), (1, 1));
        assert!(hold(&one));
        drop(plug);
        assert_eq!(unplugs(), (2, 1));
        flush();
        assert_eq!(unplugs(), (2, 1));
        assert!(!hold(&one));
    }
}
