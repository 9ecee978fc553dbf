//! A limited number of tokens, and a queue for those who wait for one.
//!
//! Each CPU has a cell with tokens, to avoid contention. A CPU takes tokens from other cells when
//! its own is empty. Tokens pass through the lock only if a waiter exists or the limit was lowered.
//!
//! # Protocol
//! * Take: one token from a cell. If all cells are empty, call [`wait`](Tokens::wait).
//! * Wait: under the lock, set `slow`, check the cells again, then queue the waiter.
//! * Give back: put the token into a cell. If `slow` is set, take the lock and serve waiters from
//!   the cells.
//! * Either the giver sees `slow`, or the new waiter sees the token in its cell.
//!
//! A taker can overtake the waiters between the two steps of a giver. The next token then goes to
//! the first waiter.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering, fence};

/// Tokens of one kind, spread over the CPUs. `W` is a waiter.
///
/// Lock order: `state` is innermost.
pub struct Tokens<W> {
    cells: Box<[CachePadded<AtomicU64>]>,
    /// 1 while a waiter exists or tokens must be withdrawn.
    slow: AtomicU32,
    state: Mutex<TokensState<W>>,
}

struct TokensState<W> {
    limit: u64,
    /// Tokens to withdraw when they are given back.
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

    /// Takes a token, preferably from cell `near`. Returns false if there is none.
    pub fn take(&self, near: usize) -> bool {
        let cells = self.cells.len();
        (0..cells).any(|n| {
            let cell = &self.cells[(near + n) % cells];
            // Relaxed: a first check. Acquire, if a token is taken: pairs with the Release of its
            // giver.
            cell.load(Ordering::Relaxed) > 0
                // Relaxed: a failure changes nothing.
                && cell.fetch_update(Ordering::Acquire, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        })
    }

    /// Queues `waiter`. Returns the waiters that got a token, perhaps this one among them.
    #[must_use]
    pub fn wait(&self, waiter: W) -> Vec<W> {
        let mut state = self.state.lock();
        state.waiting.push_back(waiter);
        self.serve(&mut state)
    }

    /// Gives a token back to cell `near`. Returns the waiters that got a token.
    #[must_use]
    pub fn give_back(&self, near: usize) -> Vec<W> {
        // Release: pairs with the Acquire of the next taker.
        self.cells[near % self.cells.len()].fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders this after the addition and pairs with the fence in `serve`.
        if self.slow.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        self.serve(&mut self.state.lock())
    }

    /// Changes the limit. Tokens in use stay valid. Returns the waiters that got a token.
    #[must_use]
    pub fn set_limit(&self, limit: u64) -> Vec<W> {
        let mut state = self.state.lock();
        if limit < state.limit {
            state.excess += state.limit - limit;
        } else {
            let more = limit - state.limit;
            let reused = more.min(state.excess);
            state.excess -= reused;
            // Release: pairs with the Acquire of the next taker.
            self.cells[0].fetch_add(more - reused, Ordering::Release);
        }
        state.limit = limit;
        self.serve(&mut state)
    }

    /// Withdraws excess tokens, then serves the waiters.
    fn serve(&self, state: &mut TokensState<W>) -> Vec<W> {
        // Relaxed: the fence orders this before the checks of the cells and pairs with the fence in
        // `give_back`.
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
            // Relaxed: a giver that sees this late only takes the lock needlessly.
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
        assert_eq!(tokens.give_back(1), ['a']);
        assert_eq!(tokens.set_limit(5), ['b'], "two more, one of them is free");
        assert!(tokens.take(0) && !tokens.take(0));
        // Five tokens are in use; three are withdrawn.
        assert!(tokens.set_limit(2).is_empty());
        assert!((0..3).all(|_| tokens.give_back(0).is_empty() && !tokens.take(0)));
        assert!(tokens.wait('c').is_empty());
        assert_eq!(tokens.give_back(1), ['c']);
        // Two tokens are in use.
        assert!(tokens.give_back(0).is_empty() && tokens.give_back(1).is_empty());
        assert!(tokens.take(1) && tokens.take(1) && !tokens.take(1));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use freestone_core::sync::Arc;

    /// Three threads want one token; a thread that gives it back serves the waiters.
    #[test]
    fn freed_token_reaches_a_waiter() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::new(1, 2));
            let served = Arc::new(AtomicU64::new(0));
            let run = |tokens: &Tokens<()>, served: &AtomicU64, cpu: usize| {
                let mut rights = if tokens.take(cpu) { 1 } else { tokens.wait(()).len() };
                while rights > 0 {
                    // Relaxed: read after the joins.
                    served.fetch_add(rights as u64, Ordering::Relaxed);
                    rights = (0..rights).map(|_| tokens.give_back(cpu).len()).sum();
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
            assert!(tokens.take(0) && !tokens.take(0), "the token must exist once");
        });
    }

    /// The limit is lowered while a token is given back.
    #[test]
    fn withdrawn_token_cannot_be_taken() {
        loom::model(|| {
            let tokens = Arc::new(Tokens::<()>::new(2, 2));
            assert!(tokens.take(0) && tokens.take(1));
            let other = Arc::clone(&tokens);
            let giver = loom::thread::spawn(move || {
                assert!(other.give_back(1).is_empty());
            });
            assert!(tokens.set_limit(1).is_empty());
            giver.join().unwrap();
            assert!(tokens.give_back(0).is_empty());
            assert!(tokens.take(0) && !tokens.take(0), "one token must be left");
        });
    }
}
