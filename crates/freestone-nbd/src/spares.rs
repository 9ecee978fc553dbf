//! Threads whose connection has ended wait a moment for the next one: to make a thread costs more
//! than most of what else a connect costs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::Link;

/// How long a thread waits. Its stack is memory, and one more thread is little.
const WAIT: Duration = Duration::from_secs(1);
/// So many wait at a time; clients that come and go one after the other need one or two.
const MAX_WAITING: usize = 8;

/// The threads that wait. The lock is held for a few instructions, and no other is taken under it.
#[derive(Debug, Default)]
pub struct Spares {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Not more than wait: each will be taken.
    links: VecDeque<Arc<Link>>,
    ended: bool,
}

impl Spares {
    /// Gives a connection to a thread that waits.
    ///
    /// # Errors
    /// No thread waits: the connection again.
    pub fn hand(&self, link: Arc<Link>) -> Result<(), Arc<Link>> {
        let mut state = self.lock();
        if state.links.len() >= state.waiting {
            return Err(link);
        }
        state.links.push_back(link);
        drop(state);
        self.came.notify_one();
        Ok(())
    }

    /// The next connection of a thread whose last one has ended. `None`: the thread ends.
    pub fn next(&self) -> Option<Arc<Link>> {
        let mut state = self.lock();
        if state.waiting >= MAX_WAITING {
            return None;
        }
        state.waiting += 1;
        let until = Instant::now() + WAIT;
        while state.links.is_empty() && !state.ended {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        // One that was handed over is taken, also at the end and where the time is up.
        state.waiting -= 1;
        state.links.pop_front()
    }

    /// No thread waits any more.
    pub fn end(&self) {
        self.lock().ended = true;
        self.came.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock panics halfway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::address::Address;

    fn link(id: u64) -> Arc<Link> {
        let socket = UnixStream::pair().unwrap().0.into();
        Arc::new(Link::new(id, Address::Unix("/s".into()), String::new(), socket).unwrap())
    }

    #[test]
    fn each_connection_is_taken_once_or_given_back() {
        const LINKS: u64 = 2000;
        let spares = Arc::new(Spares::default());
        assert!(spares.hand(link(0)).is_err(), "nobody waits");
        let (taken, taking) = mpsc::channel();
        let threads: Vec<_> = (0..MAX_WAITING + 2)
            .map(|_| {
                let (spares, taken) = (Arc::clone(&spares), taken.clone());
                thread::spawn(move || {
                    // One is too many now and then, and comes again.
                    while !spares.lock().ended {
                        if let Some(link) = spares.next() {
                            taken.send(link.id).unwrap();
                        }
                    }
                })
            })
            .collect();
        for id in 1..=LINKS {
            let mut link = link(id);
            while let Err(back) = spares.hand(link) {
                link = back;
                thread::yield_now();
            }
        }
        // What was handed over before is taken.
        spares.end();
        for thread in threads {
            thread.join().unwrap();
        }
        drop(taken);
        let ids: Vec<_> = taking.into_iter().collect();
        assert_eq!(ids.len(), LINKS as usize);
        assert_eq!(ids.into_iter().collect::<HashSet<_>>(), (1..=LINKS).collect());
        assert!(spares.next().is_none() && spares.hand(link(0)).is_err());
    }

    #[test]
    fn a_thread_waits_for_a_moment_only() {
        let begun = Instant::now();
        assert!(Spares::default().next().is_none());
        assert!(begun.elapsed() >= WAIT);
    }
}
