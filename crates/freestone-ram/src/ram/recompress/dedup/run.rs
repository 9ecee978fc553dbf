//! Compares pages on request: [`RecompressOptions::dedup`].
//!
//! A run is one pass over the selected pages of all devices of the family, whatever their age.
//!
//! Lock order: as in [`dedup`](super), with [`Pages::background`] for the whole run, except while
//! requests wait for memory. The state is locked for a leaf at a time.
//!
//! [`Pages::background`]: crate::ram::memory::pages::Pages::background

use super::{AutoDedup, Candidate, State, can_share, is_excluded, is_left_alone};
use crate::ram::geometry::PAGE;
use crate::ram::memory::shared::SharedObjects;
use crate::ram::recompress::options::{RecompressError, RecompressOptions, RecompressReport};
use crate::ram::recompress::run::GIVE_WAY;
use freestone_core::slot::{MAX_SLOTS, Word};

impl AutoDedup {
    /// Makes selected pages of the family with the same content share objects. See
    /// [`Ram::recompress_with_progress`](crate::ram::Ram::recompress_with_progress).
    pub fn run(
        &self,
        selection: &RecompressOptions,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        let pages = &*self.pages;
        let mut done = RecompressReport::default();
        selection.check_dedup().map_err(|error| (done, error))?;
        let shared = pages.shared_or_new(false).map_err(|error| (done, error.into()))?;
        let mut turn =
            Some(pages.lock_background(&mut || !watch(0, 0)).ok_or((done, RecompressError::Cancelled))?);
        if !self.begin_pass(&mut self.state.lock(), shared) {
            return Err((done, RecompressError::NoMemory));
        }
        let is_wanted = |word: Word| can_share(word) && selection.wants(word);
        let is_visited = |word: Word| is_wanted(word) || is_left_alone(shared, word);
        let (all, mut visited) = (self.pages_in_memory() * PAGE, 0);
        for layer in pages.layers.all() {
            let (mut from, mut found) = (0, Vec::new());
            while let Some(next) = layer.peek_leaf(from, MAX_SLOTS - 1, &is_visited, &mut found) {
                let progress = visited.min(all);
                if turn.is_none() || pages.keeper.is_wanted() {
                    drop(turn.take());
                    pages.wake_memory_waiters();
                    freestone_core::sync::thread::sleep(GIVE_WAY);
                    turn = pages.lock_background(&mut || !watch(progress, all));
                }
                if turn.is_none() || !watch(progress, all) {
                    return Err((done, RecompressError::Cancelled));
                }
                let Some(leaf) = layer.table().leaf(next - 1).filter(|_| !is_excluded(&layer)) else { break };
                let candidate = |&(slot, word): &(u64, Word)| (Candidate { layer: &layer, leaf, slot }, word);
                let candidates = found.iter().map(candidate);
                if !self.run_leaf(shared, candidates, selection, &is_wanted, &mut done) {
                    return Ok(done);
                }
                visited += found.len() as u64 * PAGE;
                from = next;
            }
        }
        Ok(done)
    }

    /// Works on the pages of a leaf. Returns false if the maximum number of pages is reached.
    fn run_leaf<'a>(
        &self,
        shared: &SharedObjects,
        candidates: impl Iterator<Item = (Candidate<'a>, Word)>,
        selection: &RecompressOptions,
        is_wanted: &impl Fn(Word) -> bool,
        done: &mut RecompressReport,
    ) -> bool {
        let mut state = self.state.lock();
        let State { fingerprints, .. } = &mut *state;
        for (page, word) in candidates {
            if selection.max_pages.is_some_and(|most| done.tried >= most) {
                return false;
            }
            done.count(self.visit(shared, fingerprints, &page, word, is_wanted));
        }
        true
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
