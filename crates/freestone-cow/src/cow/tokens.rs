//! A number of rights, each of one holder at a time, and who waits for one.
//!
//! Every CPU has rights of its own, so that those who take and give do not meet; where its own are
//! used up, another CPU's are taken. Only where somebody waits, or there are more rights than there
//! should be, a right goes through the lock.
//!
//! # Protocol
//! * Take: one from a cell that has one. None in any cell: [`wait`](Tokens::wait).
//! * Wait: under the lock, `slow` is set; then the cells are looked at once more; then the waiter
//!   is queued.
//! * Give: put into a cell; then, if `slow` is set, under the lock, what is in the cells goes to
//!   those who wait.
//! * Either the giver sees `slow`, or the one who waits sees the right in its cell.
//!
//! A right may be taken past those who wait, between the giver's two steps; the next one that is
//! given goes to them.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering, fence};

/// Rights to copy, counted by CPU. `W` is what waits for one.
///
/// Lock order: `state` is innermost.
pub struct Tokens<W> {
    cells: Box<[CachePadded<AtomicU64>]>,
    /// Somebody waits, or rights are to be withdrawn.
    slow: AtomicU32,
    state: Mutex<TokensState<W>>,
}

struct TokensState<W> {
    most: u64,
    /// Rights that are to be withdrawn when they are given back.
    excess: u64,
    waiting: VecDeque<W>,
}

impl<W> Tokens<W> {
    /// `most` rights, spread over `cells` cells.
    pub fn new(most: u64, cells: usize) -> Self {
        let (each, rest) = (most / cells as u64, most % cells as u64);
        let cell = |at: usize| CachePadded::new(AtomicU64::new(each + u64::from((at as u64) < rest)));
        let state = TokensState { most, excess: 0, waiting: VecDeque::new() };
        Self { cells: (0..cells).map(cell).collect(), slow: AtomicU32::new(0), state: Mutex::new(state) }
    }

    /// Takes a right, from the cell `near` or one after it. False: there is none.
    pub fn take(&self, near: usize) -> bool {
        let cells = self.cells.len();
        (0..cells).any(|n| {
            let cell = &self.cells[(near + n) % cells];
            // Relaxed: a first look. Acquire, where one is taken: pairs with the Release of who
            // gave it.
            cell.load(Ordering::Relaxed) > 0
                // Relaxed: where it fails nothing is done.
                && cell.fetch_update(Ordering::Acquire, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        })
    }

    /// Takes a right now, or queues `waiter`; who gets rights is returned.
    #[must_use]
    pub fn wait(&self, waiter: W) -> Vec<W> {
        let mut state = self.state.lock();
        state.waiting.push_back(waiter);
        self.serve(&mut state)
    }

    /// Gives a right back, to the cell `near`. Returns who gets one now.
    #[must_use]
    pub fn give(&self, near: usize) -> Vec<W> {
        // Release: pairs with the Acquire of who takes it.
        self.cells[near % self.cells.len()].fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        // Relaxed: ordered after the addition by the fence, which pairs with that in `serve`.
        if self.slow.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        self.serve(&mut self.state.lock())
    }

    /// From now on there are `most` rights. Returns who gets one. Those that are held stay.
    #[must_use]
    pub fn set_most(&self, most: u64) -> Vec<W> {
        let mut state = self.state.lock();
        if most < state.most {
            state.excess += state.most - most;
        } else {
            let more = most - state.most;
            let kept = more.min(state.excess);
            state.excess -= kept;
            // Release: pairs with the Acquire of who takes them.
            self.cells[0].fetch_add(more - kept, Ordering::Release);
        }
        state.most = most;
        self.serve(&mut state)
    }

    /// Withdraws what is to be withdrawn, then serves those who wait.
    fn serve(&self, state: &mut TokensState<W>) -> Vec<W> {
        // Relaxed: ordered before the looks at the cells by the fence, which pairs with that in
        // `give`.
        self.slow.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while state.excess > 0 && self.take(0) {
            state.excess -= 1;
        }
        let mut served = Vec::new();
        while !state.waiting.is_empty() && self.take(0) {
            served.extend(state.waiting.pop_front());
        }
        if state.waiting.is_empty() && state.excess == 0 {
            // Relaxed: who sees it too late takes the lock for nothing.
            self.slow.store(0, Ordering::Relaxed);
        }
        served
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rights_go_round_and_their_number_changes() {
        let tokens = Tokens::new(3, 2);
        assert!((0..3).all(|_| tokens.take(1)));
        assert!(!tokens.take(0));
        assert!(tokens.wait('a').is_empty() && tokens.wait('b').is_empty());
        assert_eq!(tokens.give(1), ['a']);
        assert_eq!(tokens.set_most(5), ['b'], "two more, one of them is left");
        assert!(tokens.take(0) && !tokens.take(0));
        // Five are held; three are withdrawn.
        assert!(tokens.set_most(2).is_empty());
        assert!((0..3).all(|_| tokens.give(0).is_empty() && !tokens.take(0)));
        assert!(tokens.wait('c').is_empty());
        assert_eq!(tokens.give(1), ['c']);
        // Two are held.
        assert!(tokens.give(0).is_empty() && tokens.give(1).is_empty());
        assert!(tokens.take(1) && tokens.take(1) && !tokens.take(1));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use freestone_core::sync::Arc;

    /// One right for three who want it; whoever waits is served by whoever gives.
    #[test]
    fn nobody_waits_for_a_right_that_is_free() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::new(1, 2));
            let served = Arc::new(AtomicU64::new(0));
            let run = |tokens: &Tokens<()>, served: &AtomicU64, cpu: usize| {
                let mut rights = if tokens.take(cpu) { 1 } else { tokens.wait(()).len() };
                while rights > 0 {
                    // Relaxed: read after the joins.
                    served.fetch_add(rights as u64, Ordering::Relaxed);
                    rights = (0..rights).map(|_| tokens.give(cpu).len()).sum();
                }
            };
            let threads: Vec<_> = (1..3)
                .map(|cpu| {
                    let (tokens, served) = (Arc::clone(&tokens), Arc::clone(&served));
                    loom::thread::spawn(move || run(&tokens, &served, cpu))
                })
                .collect();
            for thread in threads {
                thread.join().unwrap();
            }
            // Relaxed: after the joins.
            assert_eq!(served.load(Ordering::Relaxed), 2);
            assert!(tokens.take(0) && !tokens.take(0), "the right is there, once");
        });
    }

    /// A right is withdrawn while it is given back.
    #[test]
    fn a_right_that_is_withdrawn_is_gone() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::<()>::new(2, 2));
            assert!(tokens.take(0) && tokens.take(1));
            let other = Arc::clone(&tokens);
            let giver = loom::thread::spawn(move || {
                assert!(other.give(1).is_empty());
            });
            assert!(tokens.set_most(1).is_empty());
            giver.join().unwrap();
            assert!(tokens.give(0).is_empty());
            assert!(tokens.take(0) && !tokens.take(0), "one is left");
        });
    }
}
