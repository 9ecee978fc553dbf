//! A limited number of tokens, and a queue of waiters for tokens.
//!
//! Each CPU has a cell with a number of tokens, to avoid contention. A CPU takes tokens from other
//! cells when its own cell is empty. Tokens pass through the lock only if a waiter exists or the
//! limit was lowered.
//!
//! # Protocol
//! * Take: remove one token from a cell. If all cells are empty, call [`wait`](Tokens::wait).
//! * Wait: under the lock, queue the waiter, set `slow`, then check the cells again.
//! * Release: put the token into a cell. If `slow` is set, take the lock and serve waiters from
//!   the cells.
//! * Either the releasing thread sees `slow`, or the new waiter sees the token in the cell.
//!
//! Between the two steps of a release, another thread can take the token before the waiters. The
//! first waiter then receives the next token.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering, fence};

/// Tokens of one kind, spread over the CPUs. `W` is a waiter.
///
/// Lock order: `state` is innermost.
pub struct Tokens<W> {
    cells: Box<[CachePadded<AtomicU64>]>,
    /// 1 while a waiter exists or tokens must be withdrawn; giving back then takes the lock.
    slow: AtomicU32,
    state: Mutex<TokensState<W>>,
}

struct TokensState<W> {
    limit: u64,
    /// Number of tokens to withdraw on their release, after the limit was lowered.
    excess: u64,
    waiting: VecDeque<W>,
}

impl<W> Tokens<W> {
    /// Creates `limit` tokens, spread over `cells` cells.
    pub fn new(limit: u64, cells: usize) -> Self {
        let (each, rest) = (limit / cells as u64, limit % cells as u64);
        let cell = |at: usize| CachePadded::new(AtomicU64::new(each + u64::from((at as u64) < rest)));
        let state = TokensState { limit, excess: 0, waiting: VecDeque::new() };
        Self { cells: (0..cells).map(cell).collect(), slow: AtomicU32::new(0), state: Mutex::new(state) }
    }

    /// Takes a token, preferably from cell `near`. Returns false if all cells are empty.
    pub fn take(&self, near: usize) -> bool {
        let cells = self.cells.len();
        (0..cells).any(|n| {
            let cell = &self.cells[(near + n) % cells];
            // Relaxed: a first check. Acquire, if a token is taken: pairs with the Release
            // store of the token's release.
            cell.load(Ordering::Relaxed) > 0
                // Relaxed on failure: no token was taken.
                && cell.fetch_update(Ordering::Acquire, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        })
    }

    /// Queues `waiter`. Returns the waiters that received a token, possibly including `waiter`.
    #[must_use]
    pub fn wait(&self, waiter: W) -> Vec<W> {
        let mut state = self.state.lock();
        state.waiting.push_back(waiter);
        self.serve(&mut state)
    }

    /// Gives a token back to cell `near`. Returns the waiters that received a token.
    #[must_use]
    pub fn release(&self, near: usize) -> Vec<W> {
        // Release: pairs with the Acquire of the next thread that takes a token.
        self.cells[near % self.cells.len()].fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders this after the addition and pairs with the fence in `serve`.
        if self.slow.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        self.serve(&mut self.state.lock())
    }

    /// Changes the number of tokens. Tokens in use stay valid. Returns the waiters that received a
    /// token.
    #[must_use]
    pub fn set_limit(&self, limit: u64) -> Vec<W> {
        let mut state = self.state.lock();
        if limit < state.limit {
            state.excess += state.limit - limit;
        } else {
            let more = limit - state.limit;
            let reused = more.min(state.excess);
            state.excess -= reused;
            // Release: pairs with the Acquire of the next thread that takes a token.
            self.cells[0].fetch_add(more - reused, Ordering::Release);
        }
        state.limit = limit;
        self.serve(&mut state)
    }

    /// Withdraws excess tokens, then gives free tokens to waiters. Returns the waiters that
    /// received a token.
    fn serve(&self, state: &mut TokensState<W>) -> Vec<W> {
        // Relaxed: the fence orders this before the checks of the cells and pairs with the fence in
        // `release`.
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
            // Relaxed: a thread that releases a token and does not see the change yet only takes the
            // lock needlessly.
            self.slow.store(0, Ordering::Relaxed);
        }
        served
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn limit_change_serves_waiters_and_withdraws_tokens() {
        let tokens = Tokens::new(3, 2);
        assert!((0..3).all(|_| tokens.take(1)));
        assert!(!tokens.take(0));
        assert!(tokens.wait('a').is_empty() && tokens.wait('b').is_empty());
        assert_eq!(tokens.release(1), ['a']);
        assert_eq!(tokens.set_limit(5), ['b'], "two more, one of them is free");
        assert!(tokens.take(0) && !tokens.take(0));
        // Five tokens are in use; three are withdrawn.
        assert!(tokens.set_limit(2).is_empty());
        assert!((0..3).all(|_| tokens.release(0).is_empty() && !tokens.take(0)));
        assert!(tokens.wait('c').is_empty());
        assert_eq!(tokens.release(1), ['c']);
        // Two tokens are in use.
        assert!(tokens.release(0).is_empty() && tokens.release(1).is_empty());
        assert!(tokens.take(1) && tokens.take(1) && !tokens.take(1));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use freestone_core::sync::Arc;

    /// Two threads need the single token. The thread that gives the token back serves the waiter.
    #[test]
    fn freed_token_reaches_a_waiter() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::new(1, 2));
            let served = Arc::new(AtomicU64::new(0));
            let run = |tokens: &Tokens<()>, served: &AtomicU64, cpu: usize| {
                let mut rights = if tokens.take(cpu) { 1 } else { tokens.wait(()).len() };
                while rights > 0 {
                    // Relaxed: the count is read after the threads were joined.
                    served.fetch_add(rights as u64, Ordering::Relaxed);
                    rights = (0..rights).map(|_| tokens.release(cpu).len()).sum();
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
            // Relaxed: the threads were joined.
            assert_eq!(served.load(Ordering::Relaxed), 2);
            assert!(tokens.take(0) && !tokens.take(0), "the token must exist once");
        });
    }

    /// The limit is lowered while a token is released.
    #[test]
    fn withdrawn_token_cannot_be_taken() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::<()>::new(2, 2));
            assert!(tokens.take(0) && tokens.take(1));
            let other = Arc::clone(&tokens);
            let giver = loom::thread::spawn(move || {
                assert!(other.release(1).is_empty());
            });
            assert!(tokens.set_limit(1).is_empty());
            giver.join().unwrap();
            assert!(tokens.release(0).is_empty());
            assert!(tokens.take(0) && !tokens.take(0), "one token must be left");
        });
    }
}
