//! Rebuilds the allocation state of a pool from the slot tables of the family.

use super::backrefs::BackRefs;
use super::class::{CLASS, SPAN_PAGES, class_of};
use super::spans::UnusedSpan;
use super::{BackRef, Place, Pool, UNITS_PER_SPAN, pages_to_hold};
use freestone_core::slot::Word;
use freestone_core::sync::Ordering;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError {
    /// Two slots hold the same object, or overlapping objects.
    #[error("the object at {0:#x} is claimed twice")]
    Overlap(u64),
    /// An object of this size cannot begin at the location in the slot.
    #[error("no object of {1} bytes can begin at {0:#x}")]
    Impossible(u64, usize),
}

impl Pool {
    /// Rebuilds the allocation state from the slots, given as pairs of owner and slot word. Objects
    /// stay in place, and unused spans are returned to the system. The caller must have exclusive
    /// use of the pool.
    ///
    /// # Errors
    /// Fails if the slots contradict each other; the pool must not be used after that.
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
                // Relaxed: `&mut self` excludes other threads.
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
                self.release_pages(&span, pages..SPAN_PAGES as u32);
            }
            // Relaxed: `&mut self` excludes other threads.
            self.pages.fetch_add(u64::from(pages), Ordering::Relaxed);
            let class = self.spans.class_of(span.number());
            self.release_span(span, class);
        }
        for span in unused.into_iter().flatten() {
            self.release_pages(span.as_owned_span(), 0..SPAN_PAGES as u32);
            self.return_span(span);
        }
        Ok(())
    }

    /// Drops the allocation state and back-references, but not the objects' bytes. Returns all
    /// spans as unused.
    fn forget(&mut self) -> Vec<UnusedSpan> {
        let spans = self.all_unused();
        self.backrefs = BackRefs::new();
        for count in &self.population {
            // Relaxed: `&mut self` excludes other threads.
            count.store(0, Ordering::Relaxed);
        }
        // Relaxed: `&mut self` excludes other threads.
        self.pages.store(0, Ordering::Relaxed);
        spans
    }
}
