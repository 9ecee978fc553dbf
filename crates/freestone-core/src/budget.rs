//! A budget of bytes that the queues of a process share: what they hold for requests that are not
//! answered yet.
//!
//! Each queue has a [`Share`], takes bytes before it allocates them, and gives them back. Who finds
//! none waits, and is woken when they are there for it.
//!
//! # Fairness
//! * Most of the budget is given in the order in which it was asked for, and nobody gets by one
//!   that waits. A share asks for one thing at a time, so all have their turn.
//! * An eighth is for shares that hold little ([`LITTLE_BYTES`]). So clients that take their
//!   payload slowly, and hold all the rest, hold up large requests only.

use std::collections::{HashMap, VecDeque};

use crate::sync::{Arc, Mutex, MutexGuard};

/// A share that holds at most so many bytes may use the part of the budget that is kept for such.
pub const LITTLE_BYTES: u64 = 512 << 10;
/// The part that is kept for them: one of so many.
const KEPT_PART: u64 = 8;
/// The least budget: the largest request (32 MiB in one buffer) has room beside what is kept.
pub const MIN_BYTES: u64 = 64 << 20;
/// What a process has unless it is told.
pub const DEFAULT_BYTES: u64 = 256 << 20;

/// Called when bytes were granted to who waited for them; short, and not from under a lock.
pub trait Granted: Send + Sync {
    /// What the share waited for is there.
    fn granted(&self);
}

/// Bytes that can be taken.
///
/// Lock order: `state` is innermost, held for a look or a change. Who waits is told outside of it.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit: u64,
    main: Pool,
    kept: Pool,
    next_id: u64,
    shares: HashMap<u64, Holding>,
}

/// A part of the budget.
#[derive(Debug, Default)]
struct Pool {
    limit: u64,
    used: u64,
    /// Shares that wait, the first one first.
    waiting: VecDeque<u64>,
}

impl Pool {
    fn fits(&self, bytes: u64) -> bool {
        self.used + bytes <= self.limit
    }
}

/// What a share has.
#[derive(Default)]
struct Holding {
    main: u64,
    kept: u64,
    /// Bytes it waits for, and who is told.
    wants: u64,
    who: Option<Arc<dyn Granted>>,
}

impl Holding {
    fn is_little_with(&self, bytes: u64) -> bool {
        self.main + self.kept + bytes <= LITTLE_BYTES
    }
}

impl std::fmt::Debug for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Holding({} + {}, wants {})", self.main, self.kept, self.wants)
    }
}

impl Budget {
    /// A budget of so many bytes, at least [`MIN_BYTES`].
    pub fn new(bytes: u64) -> Arc<Self> {
        let limit = bytes.max(MIN_BYTES);
        let kept = limit / KEPT_PART;
        Arc::new(Self {
            state: Mutex::new(State {
                limit,
                main: Pool { limit: limit - kept, ..Pool::default() },
                kept: Pool { limit: kept, ..Pool::default() },
                next_id: 0,
                shares: HashMap::new(),
            }),
        })
    }

    /// A share that holds nothing; `who` is told when it was given what it waited for.
    pub fn share(self: &Arc<Self>, who: Arc<dyn Granted>) -> Share {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.shares.insert(id, Holding { who: Some(who), ..Holding::default() });
        Share { budget: Arc::clone(self), id, taken: 0, waits: false, used: false }
    }

    /// All bytes, and those that are taken.
    pub fn bytes(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.limit, state.main.used + state.kept.used)
    }
}

/// Gives what is free to those that wait, and tells them.
fn serve(mut state: MutexGuard<'_, State>) {
    let mut served = Vec::new();
    while state.serve_one(&mut served) {}
    drop(state);
    for who in served {
        who.granted();
    }
}

impl State {
    /// Takes bytes for a share that does not wait; false: there are none for it.
    fn take(&mut self, id: u64, bytes: u64) -> bool {
        let Some(share) = self.shares.get_mut(&id) else { return false };
        if self.main.waiting.is_empty() && self.main.fits(bytes) {
            self.main.used += bytes;
            share.main += bytes;
        } else if share.is_little_with(bytes) && self.kept.waiting.is_empty() && self.kept.fits(bytes) {
            self.kept.used += bytes;
            share.kept += bytes;
        } else {
            return false;
        }
        true
    }

    /// The share waits for bytes from now on.
    fn wait(&mut self, id: u64, bytes: u64) {
        let Some(share) = self.shares.get_mut(&id) else { return };
        share.wants = bytes;
        let pool = if share.is_little_with(bytes) { &mut self.kept } else { &mut self.main };
        pool.waiting.push_back(id);
    }

    /// Gives the first that waits what it wants, and adds who is to be told; false: it is not there.
    fn serve_one(&mut self, served: &mut Vec<Arc<dyn Granted>>) -> bool {
        let Some((id, from_main)) = self.next_to_serve() else { return false };
        let Some(share) = self.shares.get_mut(&id) else { return true };
        let bytes = std::mem::take(&mut share.wants);
        if from_main {
            self.main.used += bytes;
            share.main += bytes;
        } else {
            self.kept.used += bytes;
            share.kept += bytes;
        }
        served.extend(share.who.clone());
        true
    }

    /// Takes out the first that waits and can be given what it wants, and says from where.
    fn next_to_serve(&mut self) -> Option<(u64, bool)> {
        let wants = |state: &Self, id: &u64| state.shares.get(id).map_or(0, |share| share.wants);
        if let Some(id) = self.main.waiting.front()
            && self.main.fits(wants(self, id))
        {
            return Some((self.main.waiting.pop_front()?, true));
        }
        let bytes = wants(self, self.kept.waiting.front()?);
        let from_main = self.main.waiting.is_empty() && self.main.fits(bytes);
        if !from_main && !self.kept.fits(bytes) {
            return None;
        }
        Some((self.kept.waiting.pop_front()?, from_main))
    }

    /// Takes all from a share, which waits for nothing any more.
    fn leave(&mut self, id: u64) {
        self.give_back(id, u64::MAX);
        if let Some(share) = self.shares.get_mut(&id)
            && std::mem::take(&mut share.wants) > 0
        {
            self.main.waiting.retain(|waiting| *waiting != id);
            self.kept.waiting.retain(|waiting| *waiting != id);
        }
    }

    /// Takes bytes from a share: first those that large requests wait for.
    fn give_back(&mut self, id: u64, bytes: u64) {
        let Some(share) = self.shares.get_mut(&id) else { return };
        let main = bytes.min(share.main);
        let kept = (bytes - main).min(share.kept);
        share.main -= main;
        share.kept -= kept;
        self.main.used -= main;
        self.kept.used -= kept;
    }
}

/// What one queue takes of a budget. All of it is given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    id: u64,
    /// Bytes that it has.
    taken: u64,
    /// It waits for more.
    waits: bool,
    /// It has asked for bytes since it gave all back.
    used: bool,
}

/// Bytes are taken in steps of so many: small requests seldom ask.
const STEP_BYTES: u64 = 64 << 10;

impl Share {
    /// Has bytes for what is held, `total` in all, without waiting. False: there are not so many,
    /// or it waits for them: it may [`wait_for`](Self::wait_for) them.
    #[inline]
    pub fn reach(&mut self, total: u64) -> bool {
        total <= self.taken || self.take(total)
    }

    fn take(&mut self, total: u64) -> bool {
        self.used = true;
        let mut state = self.budget.state.lock();
        if self.waits {
            let Some(share) = state.shares.get(&self.id) else { return false };
            self.waits = share.wants > 0;
            self.taken = share.main + share.kept;
            if self.waits || total <= self.taken {
                return !self.waits;
            }
        }
        let more = total.next_multiple_of(STEP_BYTES) - self.taken;
        let taken = state.take(self.id, more);
        self.taken += if taken { more } else { 0 };
        taken
    }

    /// Waits for `bytes` beside those that are held, after [`reach`](Self::reach) has found none.
    /// What is not held is given back first: so all that is taken comes back without anybody's
    /// waiting.
    pub fn wait_for(&mut self, held: u64, bytes: u64) {
        if self.waits {
            return;
        }
        let excess = self.taken.saturating_sub(held);
        self.taken -= excess;
        self.waits = true;
        let mut state = self.budget.state.lock();
        state.give_back(self.id, excess);
        // What exceeds the whole, as no request does, would never be there.
        let bytes = bytes.min(state.main.limit);
        state.wait(self.id, bytes);
        serve(state);
    }

    /// Whether it has bytes, or waits for some.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Whether it waits for bytes.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Gives back what exceeds `total` bytes by more than a little.
    pub fn keep(&mut self, total: u64) {
        if self.taken > total + 2 * STEP_BYTES {
            let bytes = self.taken - total.next_multiple_of(STEP_BYTES);
            self.taken -= bytes;
            let mut state = self.budget.state.lock();
            state.give_back(self.id, bytes);
            serve(state);
        }
    }

    /// Gives back all, and waits for nothing any more.
    #[inline]
    pub fn leave(&mut self) {
        if self.is_used() {
            self.give_all();
        }
    }

    fn give_all(&mut self) {
        (self.taken, self.waits, self.used) = (0, false, false);
        let mut state = self.budget.state.lock();
        state.leave(self.id);
        serve(state);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.leave(self.id);
        state.shares.remove(&self.id);
        serve(state);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::{AtomicU32, Ordering};

    const MIB: u64 = 1 << 20;

    #[derive(Default)]
    struct Told(AtomicU32);

    impl Granted for Told {
        fn granted(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn shares<const N: usize>(budget: &Arc<Budget>) -> [(Share, Arc<Told>); N] {
        std::array::from_fn(|_| {
            let told = Arc::new(Told::default());
            (budget.share(Arc::clone(&told) as Arc<dyn Granted>), told)
        })
    }

    fn told(told: &Told) -> u32 {
        told.0.load(Ordering::SeqCst)
    }

    /// Takes so much, or waits for it with nothing held.
    fn ask(share: &mut Share, bytes: u64) -> bool {
        let there = share.reach(bytes);
        if !there {
            share.wait_for(0, bytes);
        }
        there
    }

    #[test]
    fn who_asks_first_is_served_first_and_nobody_gets_by() {
        let budget = Budget::new(64 * MIB);
        let [(mut a, _), (mut b, told_b), (mut c, told_c)] = shares(&budget);
        assert!(ask(&mut a, 50 * MIB));
        assert!(!ask(&mut b, 20 * MIB) && b.waits());
        // There is room for this one, but it came later.
        assert!(!ask(&mut c, 2 * MIB));
        a.keep(30 * MIB);
        assert_eq!((told(&told_b), told(&told_c)), (1, 1));
        assert!(b.reach(20 * MIB) && c.reach(2 * MIB) && !b.waits());
        assert_eq!(budget.bytes(), (64 * MIB, 52 * MIB));
        drop((a, b, c));
        assert_eq!(budget.bytes(), (64 * MIB, 0));
    }

    #[test]
    fn those_that_hold_little_get_by_those_that_hold_all() {
        let budget = Budget::new(64 * MIB);
        let [(mut slow, _), (mut large, told_large), (mut small, _)] = shares(&budget);
        assert!(ask(&mut slow, 56 * MIB));
        assert!(!ask(&mut large, MIB));
        assert!(ask(&mut small, LITTLE_BYTES));
        assert!(!small.reach(LITTLE_BYTES + 1), "that is not little any more");
        drop(slow);
        assert_eq!(told(&told_large), 1);
        assert!(large.reach(MIB) && small.reach(LITTLE_BYTES + 1));
    }

    #[test]
    fn little_ones_wait_for_each_other_when_their_part_is_full() {
        let budget = Budget::new(64 * MIB);
        let [(mut slow, _), (mut late, told_late)] = shares(&budget);
        assert!(ask(&mut slow, 56 * MIB));
        let mut many: [(Share, Arc<Told>); 16] = shares(&budget);
        assert!(many.iter_mut().all(|(share, _)| share.reach(LITTLE_BYTES)));
        assert!(!ask(&mut late, 4096));
        // Rather than of its own part it may have of all, once nobody waits for that.
        slow.keep(40 * MIB);
        assert_eq!(told(&told_late), 1);
        assert!(late.reach(4096));
    }

    #[test]
    fn who_leaves_while_it_waits_is_in_nobodys_way() {
        let budget = Budget::new(64 * MIB);
        let [(mut a, _), (mut b, _), (mut c, told_c)] = shares(&budget);
        assert!(ask(&mut a, 50 * MIB));
        assert!(!ask(&mut b, 30 * MIB) && !ask(&mut c, 2 * MIB));
        b.leave();
        assert!(!b.waits());
        assert_eq!(told(&told_c), 1);
        assert!(c.reach(2 * MIB));
        a.leave();
        assert_eq!(budget.bytes().1, 2 * MIB);
    }

    #[test]
    fn two_that_want_more_than_there_is_do_not_hold_each_other_up() {
        let budget = Budget::new(64 * MIB);
        let [(mut a, told_a), (mut b, told_b)] = shares(&budget);
        assert!(a.reach(28 * MIB) && b.reach(28 * MIB));
        // What they have taken, and do not hold, is not kept while they wait.
        assert!(!ask(&mut a, 32 * MIB));
        assert_eq!(told(&told_a), 0);
        assert!(!ask(&mut b, 32 * MIB));
        assert_eq!((told(&told_a), told(&told_b)), (1, 0));
        assert!(a.reach(32 * MIB));
        a.leave();
        assert_eq!(told(&told_b), 1);
    }
}
