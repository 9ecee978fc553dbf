//! `codec::lend` with a choice: the product's own file, or the shared list that the kernel had
//! before.
//!
//! As there, the list of idle streams is behind one lock, the one that came back last goes first,
//! and who finds none sleeps until one comes back. A spinlock there, a mutex here that spins before
//! it sleeps. Those who sleep are counted, so that one that gives a stream back makes a system call
//! only for them.

mod ours;

use std::ops::{Deref, DerefMut};

use freestone_core::device::Result;
use freestone_core::sync::{Condvar, Mutex, MutexGuard};
use freestone_core::variants::{self, Streams};

/// Streams in the longer and in the shorter list.
const LONG: usize = 8;
const SHORT: usize = 4;

/// One `T` for each CPU, and the lists where they are wanted.
pub struct Lender<T> {
    ours: ours::Lender<T>,
    lists: Option<Lists<T>>,
}

struct Lists<T> {
    short: List<T>,
    long: List<T>,
}

/// A `T` that is lent.
pub enum Lent<'a, T> {
    Ours(MutexGuard<'a, T>),
    Listed(Listed<'a, T>),
}

impl<T> Lender<T> {
    /// Makes them all; the lists only where one of them is chosen now.
    ///
    /// # Errors
    /// The first that `make` has.
    pub fn new(mut make: impl FnMut() -> Result<T>) -> Result<Self> {
        let ours = ours::Lender::new(&mut make)?;
        let lists = match variants::streams() {
            Streams::Ours => None,
            Streams::ListOf4 | Streams::ListOf8 => {
                Some(Lists { short: List::new(SHORT, &mut make)?, long: List::new(LONG, &mut make)? })
            }
        };
        Ok(Self { ours, lists })
    }

    /// One from where the choice says.
    #[inline]
    pub fn take(&self) -> Lent<'_, T> {
        match (variants::streams(), &self.lists) {
            (Streams::Ours, _) => Lent::Ours(self.ours.take()),
            (Streams::ListOf4, Some(lists)) => Lent::Listed(lists.short.take()),
            (Streams::ListOf8, Some(lists)) => Lent::Listed(lists.long.take()),
            (_, None) => panic!("a list of streams was not chosen before the device was made"),
        }
    }

    /// Every CPU's.
    pub fn all(&self) -> impl ExactSizeIterator<Item = &Mutex<T>> {
        self.ours.all()
    }
}

impl<T> Deref for Lent<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Self::Ours(guard) => guard,
            Self::Listed(listed) => listed.held(),
        }
    }
}

impl<T> DerefMut for Lent<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Ours(guard) => guard,
            Self::Listed(listed) => listed.held_mut(),
        }
    }
}

/// A shared list.
struct List<T> {
    idle: Mutex<Idle<T>>,
    returned: Condvar,
}

struct Idle<T> {
    // Boxed, as the kernel's list links them: taking one moves a pointer.
    streams: Vec<Box<T>>,
    sleepers: usize,
}

impl<T> List<T> {
    fn new(count: usize, make: &mut impl FnMut() -> Result<T>) -> Result<Self> {
        let streams = (0..count).map(|_| Ok(Box::new(make()?))).collect::<Result<_>>()?;
        Ok(Self { idle: Mutex::new(Idle { streams, sleepers: 0 }), returned: Condvar::new() })
    }

    fn take(&self) -> Listed<'_, T> {
        let mut idle = self.idle.lock();
        loop {
            if let Some(stream) = idle.streams.pop() {
                return Listed { list: self, stream: Some(stream) };
            }
            idle.sleepers += 1;
            // Not `pin::wait`: whoever needs a stream is pinned, and here, unlike in the product,
            // may sleep for it. Who has one gives it back without waiting for pins.
            idle = self.returned.wait(idle).unwrap_or_else(std::sync::PoisonError::into_inner);
            idle.sleepers -= 1;
        }
    }

    fn give_back(&self, stream: Box<T>) {
        let mut idle = self.idle.lock();
        idle.streams.push(stream);
        let awaited = idle.sleepers > 0;
        drop(idle);
        if awaited {
            self.returned.notify_one();
        }
    }
}

/// One of a list. Dropping it gives it back.
pub struct Listed<'a, T> {
    list: &'a List<T>,
    /// There until it is dropped.
    stream: Option<Box<T>>,
}

impl<T> Listed<'_, T> {
    #[inline]
    fn held(&self) -> &T {
        match &self.stream {
            Some(stream) => stream,
            None => unreachable!("it was given back"),
        }
    }

    #[inline]
    fn held_mut(&mut self) -> &mut T {
        match &mut self.stream {
            Some(stream) => stream,
            None => unreachable!("it was given back"),
        }
    }
}

impl<T> Drop for Listed<'_, T> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.list.give_back(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    fn list(count: usize) -> List<u64> {
        List::new(count, &mut || Ok(0)).unwrap()
    }

    #[test]
    fn each_of_a_list_is_with_one_thread_and_no_more_are_lent_than_there_are() {
        const THREADS: u64 = 12;
        const ROUNDS: u64 = 5_000;
        for count in [1, SHORT, LONG] {
            let list = list(count);
            let lent = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        for round in 0..ROUNDS {
                            let mut one = list.take();
                            assert!(lent.fetch_add(1, Ordering::SeqCst) < count);
                            let before = *one.held();
                            if round % 64 == 0 {
                                std::thread::yield_now();
                            }
                            *one.held_mut() = before + 1;
                            lent.fetch_sub(1, Ordering::SeqCst);
                        }
                    });
                }
            });
            let idle = list.idle.lock();
            assert_eq!((idle.streams.len(), idle.sleepers), (count, 0), "all came back");
            let sum: u64 = idle.streams.iter().map(|one| **one).sum();
            assert_eq!(sum, THREADS * ROUNDS, "two threads had one at a time");
        }
    }

    #[test]
    fn who_finds_none_sleeps_until_one_comes_back() {
        let list = list(2);
        let (first, second) = (list.take(), list.take());
        std::thread::scope(|scope| {
            let third = scope.spawn(|| *list.take().held());
            while list.idle.lock().sleepers == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!third.is_finished());
            drop(second);
            assert_eq!(third.join().unwrap(), 0);
        });
        drop(first);
        assert_eq!(list.idle.lock().streams.len(), 2);
    }
}
