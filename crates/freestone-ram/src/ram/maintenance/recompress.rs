//! Recompression of a device on request, and statistics of automatic recompression.

use crate::ram::device::{Inner, Ram};
use crate::ram::recompress::auto::AutoRecompressStat;
use crate::ram::recompress::dedup::DedupStat;
use crate::ram::recompress::groups::GroupStat;
use crate::ram::recompress::options::{RecompressError, RecompressOptions, RecompressReport};
use crate::ram::recompress::run::run;

impl Ram {
    /// Recompresses the selected pages with a secondary algorithm, as the kernel's `recompress`, or in
    /// groups, or makes pages with the same content share objects.
    /// Requests continue meanwhile; other recompression runs and writebacks of the family (devices
    /// that share a memory pool) wait.
    ///
    /// # Errors
    /// Fails if the selected algorithm is not configured, or if the run ends early. The error
    /// includes the report of the pages recompressed so far.
    pub fn recompress(
        &self,
        selection: &RecompressOptions,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        self.recompress_with_progress(selection, &mut |_, _| true)
    }

    /// As [`recompress`](Self::recompress), with progress. `watch` receives the bytes of the pages
    /// visited and of all selected pages. `watch` is called also while this run waits for another.
    /// The run ends when `watch` returns false.
    ///
    /// # Errors
    /// As [`recompress`](Self::recompress), and [`RecompressError::Cancelled`].
    pub fn recompress_with_progress(
        &self,
        selection: &RecompressOptions,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        let Inner { pages, family, .. } = &*self.0;
        if selection.dedup {
            return family.dedup.run(selection, watch);
        }
        if selection.group {
            return family.groups.run(&self.0.layer(), || self.0.slots() - 1, selection, watch);
        }
        run(pages, self.0.layer(), || self.0.slots() - 1, family.auto.is_on(), selection, watch)
    }

    /// Returns the statistics of automatic recompression; all zero if `auto_recompress` is not set.
    pub fn auto_recompress_stat(&self) -> AutoRecompressStat {
        self.0.family.auto.stat()
    }

    /// Returns the statistics of the family's groups of pages; `None` if the family has not formed any.
    pub fn group_stat(&self) -> Option<GroupStat> {
        self.0.family.groups.stat()
    }

    /// Returns the statistics of the objects that the family's pages share; `None` if the family has
    /// not compared pages.
    pub fn dedup_stat(&self) -> Option<DedupStat> {
        self.0.family.dedup.stat()
    }
}
