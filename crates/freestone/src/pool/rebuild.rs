//! The tables are the truth: the pool's free state can be made anew from them.

#![cfg_attr(
    not(test),
    expect(dead_code, reason = "for a process that adopts the tables of another; so far only tests do")
)]

use super::class::{CLASS, SPAN_BYTES, class_of};
use super::{BackRef, Place, Pool, UNITS_PER_SPAN, pages_to_hold};
use crate::PAGE_BYTES;
use crate::slot::Word;
use crate::sync::Ordering;

/// Why tables and pool do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError {
    /// Two slots hold one object, or objects that overlap.
    #[error("the object at {0:#x} is claimed twice")]
    Overlap(u64),
    /// A slot points where no object of its size can begin.
    #[error("no object of {1} bytes can begin at {0:#x}")]
    Impossible(u64, usize),
}

impl Pool {
    /// Forgets everything about what is free and learns it again from the slots, which are given as pairs of owner and
    /// word. Objects keep their places; spans that no slot needs go back to the system. Nobody else may use the pool.
    ///
    /// # Errors
    /// The slots contradict each other; the pool is of no use then.
    pub fn rebuild(&mut self, slots: impl Iterator<Item = (BackRef, Word)>) -> Result<(), RebuildError> {
        let handed_out = self.arena.handed_out();
        self.forget(handed_out);
        let mut in_use = vec![false; handed_out as usize];
        for (owner, word) in slots {
            let Some(location) = word.object() else { continue };
            let bytes = word.stored_bytes();
            let span = (location / UNITS_PER_SPAN) as u32;
            let class = class_of(bytes);
            let object = CLASS[class].index_at(location % UNITS_PER_SPAN);
            let place = Place { span, object, class };
            if span >= handed_out || object >= CLASS[class].objects as usize || place.location() != location {
                return Err(RebuildError::Impossible(location, bytes));
            }
            if !std::mem::replace(&mut in_use[span as usize], true) {
                self.spans.adopt(span, class, CLASS[class].objects);
                self.backrefs.open(span, CLASS[class].objects);
                // Relaxed: `&mut self`, nobody else is here.
                self.population[class].fetch_add(1, Ordering::Relaxed);
            }
            if !self.spans.belongs_to(span, class) || self.spans.is_taken(span, object) {
                return Err(RebuildError::Overlap(location));
            }
            self.spans.take(span, object);
            self.backrefs.set(span, object, owner);
            let resident = &self.spans.get(span).resident;
            // Relaxed: `&mut self`, nobody else is here.
            resident.fetch_max(pages_to_hold(&CLASS[class], object), Ordering::Relaxed);
        }
        for (span, used) in (0..handed_out).zip(in_use) {
            // Relaxed: `&mut self`, nobody else is here.
            let pages = if used { self.spans.get(span).resident.load(Ordering::Relaxed) } else { 0 };
            let at = u64::from(span) * SPAN_BYTES;
            let held = u64::from(pages) * PAGE_BYTES as u64;
            if held < SPAN_BYTES {
                self.arena.release(at + held, SPAN_BYTES - held);
            }
            // Relaxed: as above.
            self.pages.fetch_add(u64::from(pages), Ordering::Relaxed);
            if used {
                self.give_up(span, self.spans.class_of(span));
            } else {
                self.arena.free(span);
            }
        }
        Ok(())
    }

    /// Drops every notion of what is free or whose, but no object.
    fn forget(&mut self, handed_out: u32) {
        for cpu in &self.current {
            for current in cpu.iter() {
                *current.lock() = None;
            }
        }
        self.empties.lock().clear();
        self.arena.forget_free();
        for span in 0..handed_out {
            self.backrefs.close(span);
        }
        self.spans = super::Spans::new(CLASS.len());
        for count in &self.population {
            // Relaxed: `&mut self`, nobody else is here.
            count.store(0, Ordering::Relaxed);
        }
        // Relaxed: `&mut self`, nobody else is here.
        self.pages.store(0, Ordering::Relaxed);
    }
}
