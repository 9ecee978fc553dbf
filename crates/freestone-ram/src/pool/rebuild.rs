//! The tables are the truth: the pool's free state can be made anew from them.

#![cfg_attr(
    not(test),
    expect(dead_code, reason = "for a process that adopts the tables of another; so far only tests do")
)]

use super::class::{CLASS, SPAN_PAGES, class_of};
use super::spans::Unused;
use super::{BackRef, Place, Pool, UNITS_PER_SPAN, pages_to_hold};
use freestone_core::slot::Word;
use freestone_core::sync::Ordering;

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
    /// Forgets everything about what is free and learns it again from the slots, which are given as
    /// pairs of owner and word. Objects keep their places; spans that no slot needs go back to the
    /// system. Nobody else may use the pool.
    ///
    /// # Errors
    /// The slots contradict each other; the pool is of no use then.
    pub fn rebuild(&mut self, slots: impl Iterator<Item = (BackRef, Word)>) -> Result<(), RebuildError> {
        let mut unused: Vec<_> = self.forget().into_iter().map(Some).collect();
        let mut owned: Vec<_> = unused.iter().map(|_| None).collect();
        for (owner, word) in slots {
            let Some(location) = word.object() else { continue };
            let bytes = word.stored_bytes();
            let span = (location / UNITS_PER_SPAN) as u32;
            let class = class_of(bytes);
            let object = CLASS[class].index_at(location % UNITS_PER_SPAN);
            let place = Place { span, object, class };
            if span as usize >= unused.len()
                || object >= CLASS[class].objects as usize
                || place.location() != location
            {
                return Err(RebuildError::Impossible(location, bytes));
            }
            let span = if let Some(fresh) = unused[span as usize].take() {
                let fresh = self.spans.adopt(fresh, class, CLASS[class].objects);
                self.backrefs.open(&fresh, CLASS[class].objects);
                // Relaxed: `&mut self`, nobody else is here.
                self.population[class].fetch_add(1, Ordering::Relaxed);
                owned[span as usize].insert(fresh)
            } else {
                owned[span as usize].as_mut().ok_or(RebuildError::Overlap(location))?
            };
            if !self.spans.belongs_to(span, class) || self.spans.is_taken(span, object) {
                return Err(RebuildError::Overlap(location));
            }
            self.spans.take(span, object);
            self.backrefs.set(span, object, owner);
            let pages = pages_to_hold(&CLASS[class], object);
            self.spans.set_resident(span, self.spans.resident(span).max(pages));
        }
        for span in owned.into_iter().flatten() {
            let pages = self.spans.resident(&span);
            if pages < SPAN_PAGES as u32 {
                self.send_out(&span, pages..SPAN_PAGES as u32);
            }
            // Relaxed: `&mut self`, nobody else is here.
            self.pages.fetch_add(u64::from(pages), Ordering::Relaxed);
            let class = self.spans.class_of(span.number());
            self.give_up(span, class);
        }
        for span in unused.into_iter().flatten() {
            self.send_out(span.as_owned(), 0..SPAN_PAGES as u32);
            self.return_span(span);
        }
        Ok(())
    }

    /// Drops every notion of what is free or whose, but no object.
    fn forget(&mut self) -> Vec<Unused> {
        let spans = self.all_unused();
        for span in &spans {
            self.backrefs.close(span);
        }
        for count in &self.population {
            // Relaxed: `&mut self`, nobody else is here.
            count.store(0, Ordering::Relaxed);
        }
        // Relaxed: `&mut self`, nobody else is here.
        self.pages.store(0, Ordering::Relaxed);
        spans
    }
}
