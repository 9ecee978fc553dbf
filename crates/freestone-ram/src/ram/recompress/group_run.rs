//! Forms groups of selected pages on request: [`RecompressOptions::group`].
//!
//! A run is one pass over the device's slots in order. The run skips selected pages with fewer than
//! 3 selected neighbours, and pages that do not gain.
//!
//! Lock order: as in [`groups`](super::groups), with [`Pages::background`] for the whole run, except
//! while requests wait for memory.
//!
//! [`Pages::background`]: crate::ram::memory::pages::Pages::background

use std::sync::Arc;

use super::groups::{AutoGroup, Buffers, GROUP_PAGES_MIN, Selection, is_alone, neighbours};
use super::options::{RecompressError, RecompressOptions, RecompressReport};
use super::run::GIVE_WAY;
use super::space::{Attempt, RecompressSpace};
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::Layer;
use freestone_core::slot::Word;

impl AutoGroup {
    /// Forms groups of the selected pages of a device's `layer`, up to the slot that `last_slot`
    /// returns when no other background work runs. See
    /// [`Ram::recompress_with_progress`](crate::ram::Ram::recompress_with_progress).
    pub fn run(
        &self,
        layer: &Arc<Layer>,
        last_slot: impl FnOnce() -> u64,
        selection: &RecompressOptions,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        let pages = &*self.pages;
        let mut done = RecompressReport::default();
        selection.check_group().map_err(|error| (done, error))?;
        let groups = pages.groups_or_new().map_err(|error| (done, error.into()))?;
        let mut work = Buffers::new().map_err(|error| (done, error.into()))?;
        // The keeper takes pages out of groups. Without it, pages stay in groups until they are
        // written.
        if let Err(error) = pages.keeper.start() {
            tracing::warn!(%error, "cannot start the keeper thread: pages stay in groups");
        }
        let mut turn =
            Some(pages.lock_background(&mut || !watch(0, 0)).ok_or((done, RecompressError::Cancelled))?);
        let is_wanted = |word: Word| is_alone(word) && selection.wants(word);
        let chosen = Selection { groups, is_wanted: &is_wanted, clears_idle: true };
        let (last, max_pages) = (last_slot(), selection.max_pages.unwrap_or(u64::MAX));
        let (mut space, mut was_refused) = (RecompressSpace::default(), false);
        let (mut from, mut found) = (0, Vec::new());
        while let Some(next) = layer.peek_leaf(from, last, &is_wanted, &mut found) {
            let progress = (from * PAGE, (last + 1) * PAGE);
            if turn.is_none() || pages.keeper.is_wanted() {
                drop(turn.take());
                pages.wake_memory_waiters();
                freestone_core::sync::thread::sleep(GIVE_WAY);
                turn = pages.lock_background(&mut || !watch(progress.0, progress.1));
            }
            if turn.is_none() || !watch(progress.0, progress.1) {
                return Err((done, RecompressError::Cancelled));
            }
            let Some(leaf) = layer.table().leaf(next - 1) else { break };
            for near in neighbours(&found).filter(|near| near.len() >= GROUP_PAGES_MIN) {
                if done.tried + near.len() as u64 > max_pages {
                    return Ok(done);
                }
                if layer.is_retired() {
                    return Ok(done);
                }
                let mut form =
                    || self.form(&chosen, &mut work, layer, leaf, near.iter().map(|(slot, _)| *slot));
                let mut attempt = form();
                if attempt == Attempt::NoSpace && space.is_worth_compacting() && pages.compact() > 0 {
                    attempt = form();
                }
                space.count(attempt);
                was_refused |= attempt == Attempt::NoSpace;
                done.count_group(attempt, near.len() as u64);
            }
            from = next;
        }
        if was_refused && done.shrunk == 0 { Err((done, RecompressError::NoSpace)) } else { Ok(done) }
    }
}

#[cfg(test)]
#[path = "group_run_tests.rs"]
mod tests;
