//! Creation, caching and destruction of spans, and the current spans of CPUs.

use super::class::CLASS;
use super::spans::{OwnedSpan, UnusedSpan};
use super::{Currents, EMPTIES_MAX, Place, Pool, pages_to_hold};
use freestone_core::device::Result;
use freestone_core::percpu;
use freestone_core::sync::{OnceLock, Ordering};

impl Pool {
    pub(super) fn new_span(&self, class: usize) -> Result<OwnedSpan> {
        let cached = self.empties.lock().pop();
        let span = match cached {
            Some(span) => span,
            None => self.alloc_span()?,
        };
        let span = self.spans.adopt(span, class, CLASS[class].objects);
        // A cached span still has the memory of its former class, perhaps more than this class
        // needs.
        self.trim(&span, (pages_to_hold(&CLASS[class], 0) + self.pages_ahead(class)).min(CLASS[class].pages));
        self.backrefs.open(&span, CLASS[class].objects);
        // Relaxed: an approximate number is enough.
        self.population[class].fetch_add(1, Ordering::Relaxed);
        Ok(span)
    }

    /// Gives up ownership of a span: lists it, or recycles it if it is empty.
    pub(super) fn release_span(&self, span: OwnedSpan, class: usize) {
        if let Some(span) = self.spans.disown(span, class, CLASS[class].objects) {
            self.recycle_span(span, class);
        }
    }

    /// Caches or destroys an empty span, which was in `class` until now.
    pub(super) fn recycle_span(&self, span: UnusedSpan, class: usize) {
        self.backrefs.close(&span);
        // Relaxed: an approximate number is enough.
        self.population[class].fetch_sub(1, Ordering::Relaxed);
        {
            let mut empties = self.empties.lock();
            if empties.len() < EMPTIES_MAX {
                empties.push(span);
                return;
            }
        }
        self.destroy_span(span);
    }

    /// Returns a span to the arena, and the memory of the span to the system.
    pub(super) fn destroy_span(&self, span: UnusedSpan) {
        self.trim(span.as_owned_span(), 0);
        self.return_span(span);
    }

    /// Returns the memory of a span beyond its first `pages` pages to the system. That memory must
    /// not contain an object.
    pub(super) fn trim(&self, span: &OwnedSpan, pages: u32) {
        let resident = self.spans.resident(span);
        if resident > pages {
            self.release_pages(span, pages..resident);
            self.spans.set_resident(span, pages);
            self.uncharge(resident - pages);
        }
    }

    /// Returns the memory of all cached empty spans to the system.
    pub fn release_empties(&self) {
        // Keep the lock until all are destroyed: a concurrent caller must find the memory freed,
        // not just the list empty.
        let mut empties = self.empties.lock();
        for span in empties.drain(..) {
            self.destroy_span(span);
        }
    }

    /// Releases a CPU's current span, whose last object was freed, unless another thread holds the
    /// lock of the CPU's current span.
    #[cold]
    pub(super) fn drop_empty_current(&self, place: Place) {
        let cpu = percpu::current();
        // Start with this CPU, whose current span is the most likely one.
        for cpu in self.current[cpu..].iter().chain(&self.current[..cpu]).filter_map(OnceLock::get) {
            let Some(mut current) = cpu[place.class].try_lock() else { continue };
            if current.as_ref().is_some_and(|span| span.number() == place.span) {
                if let Some(span) = current.take_if(|span| self.spans.used(span) == 0) {
                    self.release_span(span, place.class);
                }
                return;
            }
        }
    }

    pub(super) fn currents(&self) -> impl Iterator<Item = &Currents> {
        self.current.iter().filter_map(OnceLock::get).map(|currents| &**currents)
    }

    /// Releases the current spans of a class of all CPUs, so that they are listed.
    pub(super) fn list_currents(&self, class: usize) {
        for cpu in self.currents() {
            let span = cpu[class].lock().take();
            if let Some(span) = span {
                self.release_span(span, class);
            }
        }
    }
}
