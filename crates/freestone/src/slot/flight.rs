//! Slots in flight: a slot whose content is on its way from or to a disk holds no lock, but a kind of its own, and
//! requests that need it queue here.
//!
//! # Protocol
//! * [`depart`](Flights::depart): under the slot's lock, the word becomes `InFlight(n)` and flight `n` opens.
//! * [`wait`](Flights::wait): under the slot's lock, while it is in flight, a continuation is added to flight `n`.
//! * [`land`](Flights::land): under the slot's lock, flight `n` closes and the new word is published; the continuations run
//!   after the unlock, in the order in which they came.
//!
//! All three hold the slot's lock, so a continuation is either in the list that `land` takes, or its request sees
//! the new word.
//!
//! Lock order: slot, then `open`.

#![cfg_attr(not(test), expect(dead_code, reason = "so far only tests put slots in flight; writeback will"))]

use super::lock::SlotGuard;
use super::word::{Kind, Word};
use crate::sync::Mutex;

type Continuation = Box<dyn FnOnce() + Send>;

/// The flights of one family of tables.
#[derive(Default)]
pub struct Flights {
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    flights: Vec<Option<Vec<Continuation>>>,
    free: Vec<u32>,
}

impl Flights {
    /// Puts a slot in flight and unlocks it. Returns what it held.
    pub fn depart(&self, guard: SlotGuard<'_>) -> Word {
        let held = guard.word();
        debug_assert_ne!(held.kind(), Kind::InFlight, "a slot departs once");
        let number = {
            let mut open = self.open.lock();
            if let Some(number) = open.free.pop() {
                open.flights[number as usize] = Some(Vec::new());
                number
            } else {
                open.flights.push(Some(Vec::new()));
                (open.flights.len() - 1) as u32
            }
        };
        guard.publish(Word::in_flight(number));
        held
    }

    /// Runs `continuation` when the slot, which is locked and in flight, has landed.
    pub fn wait(&self, guard: &SlotGuard<'_>, continuation: Continuation) {
        let number = number(guard);
        match &mut self.open.lock().flights[number] {
            Some(waiting) => waiting.push(continuation),
            None => unreachable!("slot in flight {number}, which is not open"),
        }
    }

    /// Ends the flight of a locked slot: publishes `new`, unlocks, lets those go on that waited.
    pub fn land(&self, guard: SlotGuard<'_>, new: Word) {
        let number = number(&guard);
        let waiting = {
            let mut open = self.open.lock();
            open.free.push(number as u32);
            open.flights[number].take()
        };
        guard.publish(new);
        for continuation in waiting.into_iter().flatten() {
            continuation();
        }
    }
}

fn number(guard: &SlotGuard<'_>) -> usize {
    debug_assert_eq!(guard.word().kind(), Kind::InFlight);
    guard.word().location() as usize
}
