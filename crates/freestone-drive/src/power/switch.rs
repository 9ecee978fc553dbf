//! Switches the simulated power off and on: power cuts, resets, and visits of earlier points of the
//! recording.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::choice::CutChoice;
use super::counted::fail_held;
use super::drain::PowerShared;
use super::log::{self, Reader};
use super::record::{EntryKind, Recorder};
use super::shard::{Block, Content, Kind};
use super::{CutReport, Point, RecordError, VisitReport};
use freestone_core::device::{Blocking, Error, Flags, Result};
use freestone_core::sync::{Instant, MutexGuard};

/// Maximum size in bytes of reads and writes to the device under this layer while the power is off.
const RUN_MAX_BYTES: u64 = 1 << 20;
/// Time without any completion of the device under this layer after which switching the power off
/// fails.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// Guard that keeps the power off. Meanwhile no request is admitted, and none is in flight to the
/// device under this layer.
struct PowerOffGuard<'a> {
    shared: &'a PowerShared,
    change: Option<MutexGuard<'a, ()>>,
}

impl Drop for PowerOffGuard<'_> {
    fn drop(&mut self) {
        let held = self.shared.power.open();
        // Requests that found the gate closed have already read `wiping`.
        self.shared.wiping.store(0, SeqCst);
        self.change = None;
        for task in held {
            task();
        }
    }
}

impl PowerShared {
    /// Switches the power off. Queued requests fail with `Gone`; requests in flight to the device
    /// under this layer complete normally. For a reset (`wipe`), all requests complete first, and
    /// new ones wait.
    ///
    /// # Errors
    /// [`Error::Gone`] if the device under this layer completes nothing for [`QUIET_MAX`]. The
    /// power is then on again, and nothing has changed.
    fn switch_off(&self, wipe: bool) -> Result<PowerOffGuard<'_>> {
        let change = Some(self.change.lock());
        self.wiping.store(u32::from(wipe), SeqCst);
        let quiet = self.power.close_within(QUIET_MAX);
        let off = PowerOffGuard { shared: self, change };
        if !quiet {
            return Err(Error::Gone);
        }
        self.events.listen();
        self.events.notify_always();
        let quiet = loop {
            let seen = self.events.count();
            if self.in_flight.load(SeqCst) == 0 && self.queue.is_empty() {
                break true;
            }
            self.events.wait_until(seen, Instant::now() + QUIET_MAX);
            if self.events.count() == seen {
                break false;
            }
        };
        self.events.stop_listening();
        if quiet { Ok(off) } else { Err(Error::Gone) }
    }

    pub fn cut(self: &Arc<Self>, seed: u64) -> Result<CutReport> {
        if self.countdown.is_partly_restored() {
            return Err(Error::Media);
        }
        self.fail_held_requests();
        let cut = self.cut_now(seed);
        self.stop_counting();
        cut
    }

    fn cut_now(&self, seed: u64) -> Result<CutReport> {
        let _off = self.switch_off(false)?;
        let choice = CutChoice::new(seed);
        let mut cut = CutReport { seed, kept_blocks: 0, lost_blocks: 0 };
        // Blocks that lost their newest version. The recording contains that version, so their
        // actual content must be recorded, too.
        let mut set_back = Vec::new();
        let mut kept = BTreeMap::new();
        let mut blocks = self.cache.take().into_iter().peekable();
        while let Some((block, first)) = blocks.next() {
            let unit = self.cache.unit_of(block);
            let mut parts = vec![(block, first)];
            while let Some(part) = blocks.next_if(|(block, _)| self.cache.unit_of(*block) == unit) {
                parts.push(part);
            }
            let until = decide(choice, unit, &parts, &mut cut);
            for (block, Block { mut versions, .. }) in parts {
                let stays = versions.partition_point(|(moment, _)| *moment < until);
                if stays < versions.len() {
                    set_back.push(block);
                }
                versions.truncate(stays);
                kept.extend(versions.pop().map(|(_, content)| (block, content)));
            }
        }
        let written = self.write_kept(&kept, &mut set_back);
        if let Some(record) = &self.cache.record {
            self.record_cut(record, seed, &set_back);
        }
        // Data that survived this cut must be durable, so that it also survives the next one.
        let flushed = self.inner.flush();
        written.and(flushed).map(|()| cut)
    }

    /// Writes the blocks that survive a power cut to the device under this layer, and returns the
    /// first error. After a failed write, the old and the new content are both valid results of the
    /// cut. Such blocks are added to `unsure`, so that their actual content is recorded.
    fn write_kept(&self, kept: &BTreeMap<u64, Content>, unsure: &mut Vec<u64>) -> Result<()> {
        let block = self.cache.block_bytes();
        let mut outcome = Ok(());
        let mut blocks = kept.iter().peekable();
        let mut data = Vec::new();
        while let Some((&first, content)) = blocks.next() {
            let kind = content.kind();
            let mut count = 1;
            data.clear();
            add(&mut data, content);
            while count * block < RUN_MAX_BYTES
                && let Some((_, next)) =
                    blocks.next_if(|(next, content)| **next == first + count && content.kind() == kind)
            {
                add(&mut data, next);
                count += 1;
            }
            let written = match kind {
                Kind::Bytes => self.inner.write_at(first * block, &data, Flags::empty()),
                Kind::Zeroes => self.inner.write_zeroes(first * block, count * block, Flags::empty()),
                Kind::Hole => self.inner.write_zeroes(first * block, count * block, Flags::MAY_FREE),
            };
            if written.is_err() {
                unsure.extend(first..first + count);
            }
            outcome = outcome.and(written);
        }
        unsure.sort_unstable();
        unsure.dedup();
        outcome
    }

    /// Records the content of the blocks `set_back` after a power cut, so that replaying the log
    /// results in the actual content.
    fn record_cut(&self, record: &Recorder, seed: u64, set_back: &[u64]) {
        if !record.is_running() {
            return;
        }
        record.note(&format!("power-cut {seed}"));
        let block = self.cache.block_bytes();
        let most = (RUN_MAX_BYTES / block) as usize;
        for run in set_back.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(most)) {
            record.wait_for_space();
            let mut data = vec![0; run.len() * block as usize];
            if let Err(error) = self.inner.read_at(run[0] * block, &mut data) {
                record.stop(&format!("reading the blocks that a power cut left failed: {error}"));
                return;
            }
            record.push(run[0] * block, data.len() as u64, EntryKind::Data(data.into_boxed_slice()));
        }
        record.push(0, 0, EntryKind::Flush);
    }

    pub fn reset(&self, below: &dyn Fn() -> Result<()>) -> Result<()> {
        let _off = self.switch_off(true)?;
        self.cache.take();
        below()?;
        self.countdown.set_consistent();
        if let Some(record) = &self.cache.record {
            record.note(log::RESET_MARK);
        }
        Ok(())
    }

    pub fn visit(
        &self,
        point: &Point,
        cut: Option<u64>,
        reset: &dyn Fn() -> Result<()>,
    ) -> std::result::Result<VisitReport, RecordError> {
        let record = self.cache.record.as_ref().ok_or(RecordError::NotRecording)?;
        // The point and the log are checked before anything changes.
        let mut reader = Reader::open(record.path())?;
        let entries = match point {
            Point::Entry(asked) => *asked,
            Point::Mark(text) => reader.find_mark(text)? + 1,
        };
        let cut = cut.map(|seed| (seed, self.cache.unit_bytes()));
        let plan = log::Plan::new(&mut reader, entries, self.inner.geometry().size, cut)?;
        let _off = self.switch_off(false)?;
        self.cache.take();
        record.stop("an earlier point was visited");
        let replayed =
            reset().map_err(RecordError::Device).and_then(|()| Ok(plan.run(&mut reader, &*self.inner)?));
        match replayed {
            Ok(cut) => {
                self.countdown.set_consistent();
                Ok(VisitReport { entries, cut })
            }
            Err(error) => {
                fail_held(self.countdown.stay_off());
                Err(RecordError::HalfSetBack(Box::new(error)))
            }
        }
    }
}

/// Chooses which writes to a unit survive a power cut, and counts the choice in `cut`. Returns the
/// moment before which writes survive. `parts` are the unflushed blocks of the unit.
fn decide(choice: CutChoice, unit: u64, parts: &[(u64, Block)], cut: &mut CutReport) -> u64 {
    let floor = parts.iter().map(|(_, block)| block.floor).max().unwrap_or_default();
    let versions = parts.iter().flat_map(|(_, block)| &block.versions);
    let mut open: Vec<u64> = versions.map(|(moment, _)| *moment).filter(|moment| *moment >= floor).collect();
    open.sort_unstable();
    open.dedup();
    if open.is_empty() {
        return u64::MAX;
    }
    match choice.of(unit, open.len() as u64) {
        None => {
            cut.lost_blocks += 1;
            open[0]
        }
        Some(version) => {
            cut.kept_blocks += 1;
            open[version as usize] + 1
        }
    }
}

fn add(data: &mut Vec<u8>, content: &Content) {
    if let Content::Bytes(bytes) = content {
        data.extend_from_slice(bytes);
    }
}

/// Checks at compile time that the worker thread can share the state.
const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Arc<PowerShared>>();
};
