//! `codec::lend` with selectable sources of compression streams: the product's own file, or the
//! shared list that the kernel had before streams per CPU.
//!
//! As in the kernel, one lock guards the list of idle streams, and the stream that was returned
//! last is borrowed first. A thread that finds no stream sleeps until a stream is returned. The
//! kernel's lock was a spinlock; here the lock is a mutex that spins before it sleeps. Sleepers are
//! counted, so that returning a stream makes a system call only if a thread sleeps.

mod ours;

use std::ops::{Deref, DerefMut};

use freestone_core::device::Result;
use freestone_core::sync::{Condvar, Mutex, MutexGuard};
use freestone_core::variants::{self, Streams};

/// Number of streams in the longer and in the shorter list.
const LONG: usize = 8;
const SHORT: usize = 4;

/// A stream `T` per CPU, and the shared lists if they are needed.
pub struct Lender<T> {
    ours: ours::Lender<T>,
    lists: Option<Lists<T>>,
}

struct Lists<T> {
    short: List<T>,
    long: List<T>,
}

/// A borrowed stream `T`.
pub enum Lent<'a, T> {
    Ours(MutexGuard<'a, T>),
    ListGuard(ListGuard<'a, T>),
}

impl<T> Lender<T> {
    /// Creates all streams. The lists are created only if one of them is selected now.
    ///
    /// # Errors
    /// Fails if `make` fails.
    pub fn try_new(mut make: impl FnMut() -> Result<Mutex<T>>) -> Result<Self> {
        let ours = ours::Lender::try_new(&mut make)?;
        let mut make = || make().map(Mutex::into_inner);
        let lists = match variants::streams() {
            Streams::Ours => None,
            Streams::ListOf4 | Streams::ListOf8 => {
                Some(Lists { short: List::new(SHORT, &mut make)?, long: List::new(LONG, &mut make)? })
            }
        };
        Ok(Self { ours, lists })
    }

    /// Borrows a stream from the selected source.
    #[inline]
    pub fn lock(&self) -> Lent<'_, T> {
        match (variants::streams(), &self.lists) {
            (Streams::Ours, _) => Lent::Ours(self.ours.lock()),
            (Streams::ListOf4, Some(lists)) => Lent::ListGuard(lists.short.take()),
            (Streams::ListOf8, Some(lists)) => Lent::ListGuard(lists.long.take()),
            (_, None) => panic!("no list of streams was selected before the device was created"),
        }
    }

    /// Returns the streams of all CPUs.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Mutex<T>> {
        self.ours.iter().map(|stream| &**stream)
    }
}

impl<T> Deref for Lent<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Self::Ours(guard) => guard,
            Self::ListGuard(guard) => guard.stream(),
        }
    }
}

impl<T> DerefMut for Lent<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Ours(guard) => guard,
            Self::ListGuard(guard) => guard.stream_mut(),
        }
    }
}

/// A shared list of streams.
struct List<T> {
    idle: Mutex<Idle<T>>,
    returned: Condvar,
}

struct Idle<T> {
    // Boxed, as the kernel links list entries: borrowing moves a pointer.
    streams: Vec<Box<T>>,
    sleepers: usize,
}

impl<T> List<T> {
    fn new(count: usize, make: &mut impl FnMut() -> Result<T>) -> Result<Self> {
        let streams = (0..count).map(|_| Ok(Box::new(make()?))).collect::<Result<_>>()?;
        Ok(Self { idle: Mutex::new(Idle { streams, sleepers: 0 }), returned: Condvar::new() })
    }

    fn take(&self) -> ListGuard<'_, T> {
        let mut idle = self.idle.lock();
        loop {
            if let Some(stream) = idle.streams.pop() {
                return ListGuard { list: self, stream: Some(stream) };
            }
            idle.sleepers += 1;
            // `pin::wait` is not used: the caller is pinned and, unlike in the product, may sleep
            // here. A thread that has a stream returns it without waiting for pins.
            idle = self.returned.wait(idle);
            idle.sleepers -= 1;
        }
    }

    fn return_stream(&self, stream: Box<T>) {
        let mut idle = self.idle.lock();
        idle.streams.push(stream);
        let awaited = idle.sleepers > 0;
        drop(idle);
        if awaited {
            self.returned.notify_one();
        }
    }
}

/// A stream borrowed from a list. Drop returns the stream to the list.
pub struct ListGuard<'a, T> {
    list: &'a List<T>,
    /// The borrowed stream; None only during drop.
    stream: Option<Box<T>>,
}

impl<T> ListGuard<'_, T> {
    #[inline]
    fn stream(&self) -> &T {
        match &self.stream {
            Some(stream) => stream,
            None => unreachable!("the stream was returned"),
        }
    }

    #[inline]
    fn stream_mut(&mut self) -> &mut T {
        match &mut self.stream {
            Some(stream) => stream,
            None => unreachable!("the stream was returned"),
        }
    }
}

impl<T> Drop for ListGuard<'_, T> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.list.return_stream(stream);
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
    fn listed_streams_are_exclusive_and_bounded() {
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
                            let before = *one.stream();
                            if round % 64 == 0 {
                                std::thread::yield_now();
                            }
                            *one.stream_mut() = before + 1;
                            lent.fetch_sub(1, Ordering::SeqCst);
                        }
                    });
                }
            });
            let idle = list.idle.lock();
            assert_eq!((idle.streams.len(), idle.sleepers), (count, 0), "all streams were returned");
            let sum: u64 = idle.streams.iter().map(|one| **one).sum();
            assert_eq!(sum, THREADS * ROUNDS, "two threads used a stream at the same time");
        }
    }

    #[test]
    fn borrower_sleeps_until_stream_is_returned() {
        let list = list(2);
        let (first, second) = (list.take(), list.take());
        std::thread::scope(|scope| {
            let third = scope.spawn(|| *list.take().stream());
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
