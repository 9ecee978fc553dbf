//! Idle connection threads. A thread whose connection has ended waits briefly for the next one, as creating a
//! thread is the largest cost of a new connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::sync::{Condvar, Mutex};

use crate::link::Link;

/// Time for which an idle thread waits for a connection before it ends and frees its stack.
const WAIT: Duration = Duration::from_secs(1);
/// Maximum number of idle threads. Clients that connect one after the other need one or two.
const MAX_WAITING: usize = 8;

/// The idle threads of a server. Leaf lock, held for a few instructions.
#[derive(Debug, Default)]
pub struct IdleThreads {
    state: Mutex<State>,
    wakeup: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Connections for idle threads; at most one for each waiting thread.
    links: VecDeque<Arc<Link>>,
    ended: bool,
}

impl IdleThreads {
    /// Gives a connection to an idle thread.
    ///
    /// # Errors
    /// Returns the connection if no thread is idle.
    pub fn assign(&self, link: Arc<Link>) -> Result<(), Arc<Link>> {
        let mut state = self.state.lock();
        if state.links.len() >= state.waiting {
            return Err(link);
        }
        state.links.push_back(link);
        drop(state);
        self.wakeup.notify_one();
        Ok(())
    }

    /// Waits for the next connection. Returns None if the thread must end: no connection came within
    /// [`WAIT`], [`MAX_WAITING`] threads are idle, or the server has ended.
    pub fn next_connection(&self) -> Option<Arc<Link>> {
        let mut state = self.state.lock();
        if state.waiting >= MAX_WAITING {
            return None;
        }
        state.waiting += 1;
        let is_idle = |state: &mut State| state.links.is_empty() && !state.ended;
        state = self.wakeup.wait_timeout_while(state, WAIT, is_idle).0;
        // A queued connection is taken even after the timeout or after `end`.
        state.waiting -= 1;
        state.links.pop_front()
    }

    /// Ends all idle threads, and keeps further threads from waiting.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.wakeup.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::address::Address;

    fn link(id: u64) -> Arc<Link> {
        let socket = UnixStream::pair().unwrap().0.into();
        Arc::new(Link::new(id, Address::Unix("/s".into()), String::new(), socket).unwrap())
    }

    #[test]
    fn connection_is_taken_once_or_returned() {
        const LINKS: u64 = 2000;
        let idle_threads = Arc::new(IdleThreads::default());
        assert!(idle_threads.assign(link(0)).is_err(), "no thread is idle");
        let (taken, taking) = mpsc::channel();
        let threads: Vec<_> = (0..MAX_WAITING + 2)
            .map(|_| {
                let (idle_threads, taken) = (Arc::clone(&idle_threads), taken.clone());
                thread::spawn(move || {
                    // A thread above the limit receives None, and tries again.
                    while !idle_threads.state.lock().ended {
                        if let Some(link) = idle_threads.next_connection() {
                            taken.send(link.id).unwrap();
                        }
                    }
                })
            })
            .collect();
        for id in 1..=LINKS {
            let mut link = link(id);
            while let Err(back) = idle_threads.assign(link) {
                link = back;
                thread::yield_now();
            }
        }
        // Connections queued before `end` are still taken.
        idle_threads.end();
        for thread in threads {
            thread.join().unwrap();
        }
        drop(taken);
        let ids: Vec<_> = taking.into_iter().collect();
        assert_eq!(ids.len(), LINKS as usize);
        assert_eq!(ids.into_iter().collect::<HashSet<_>>(), (1..=LINKS).collect());
        assert!(idle_threads.next_connection().is_none() && idle_threads.assign(link(0)).is_err());
    }

    #[test]
    fn idle_thread_wait_times_out() {
        let begun = Instant::now();
        assert!(IdleThreads::default().next_connection().is_none());
        assert!(begun.elapsed() >= WAIT);
    }
}
