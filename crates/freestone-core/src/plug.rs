//! Batches, by plugs, as in the kernel's block layer (`struct blk_plug`).
//!
//! Whoever is about to submit several requests starts a [`Plug`] on its thread. A device that can
//! hand over many at once holds what comes meanwhile, and is told when the plug is released. So a
//! batch goes through all layers between, and none of them has to know of it. In the same way
//! whoever answers several requests starts one: who is answered is woken once.
//!
//! A thread that has a plug waits for what it submitted under it only after a [`flush`].

use std::cell::RefCell;
use std::marker::PhantomData;

use crate::sync::{Arc, thread_local};

/// What holds requests, or answers, while the thread that gives them has a plug.
pub trait Unplug: Send + Sync {
    /// The plug is released: what was held is handed over.
    fn unplug(&self);
}

/// Who is to be told; none where the thread has no plug.
type Held = Option<Vec<Arc<dyn Unplug>>>;

thread_local! {
    static HELD: RefCell<Held> = const { RefCell::new(None) };
}

/// Holds what its thread submits or answers, until it is dropped. One inside of another does
/// nothing.
#[derive(Debug)]
pub struct Plug {
    is_outer: bool,
    /// Of this thread.
    thread: PhantomData<*const ()>,
}

impl Plug {
    /// From now on.
    pub fn start() -> Self {
        let is_outer = HELD.with_borrow_mut(|held| {
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
            // What is handed over may lead to more, which is not held.
            for held in HELD.take().into_iter().flatten() {
                held.unplug();
            }
        }
    }
}

/// Hands over what the thread holds, and goes on holding what comes: before a wait for what may be
/// among it, as the kernel does before a task sleeps.
pub fn flush() {
    let take = || HELD.with_borrow_mut(|held| held.as_mut().map_or(Vec::new(), std::mem::take));
    // What is handed over may lead to more.
    loop {
        let held = take();
        if held.is_empty() {
            return;
        }
        for held in held {
            held.unplug();
        }
    }
}

/// Whether the thread has a plug: `holder` is told when that is released.
pub fn hold<T: Unplug + 'static>(holder: &Arc<T>) -> bool {
    HELD.with_borrow_mut(|held| {
        let Some(holders) = held else { return false };
        let address = Arc::as_ptr(holder).cast::<()>();
        // Few: one for each device and queue that a batch comes to.
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
    fn each_holder_is_told_once_when_the_outer_plug_is_released() {
        let (one, other) = (Arc::new(Counts::default()), Arc::new(Counts::default()));
        let told = || (one.0.load(Ordering::SeqCst), other.0.load(Ordering::SeqCst));
        assert!(!hold(&one));
        let plug = Plug::start();
        {
            let _inner = Plug::start();
            assert!(hold(&one) && hold(&other) && hold(&one));
        }
        assert_eq!(told(), (0, 0));
        flush();
        assert_eq!(told(), (1, 1));
        flush();
        assert_eq!(told(), (1, 1));
        assert!(hold(&one));
        drop(plug);
        assert_eq!(told(), (2, 1));
        flush();
        assert_eq!(told(), (2, 1));
        assert!(!hold(&one));
    }
}
