//! Power off, and on again: cuts, resets, and visits of the past.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::choice::Choice;
use super::counted::refuse;
use super::drain::PowerShared;
use super::log::{self, Reader};
use super::record::{Recorder, What};
use super::shard::{Block, Content, Kind};
use super::{Cut, Point, RecordError, Visited};
use freestone_core::device::{Blocking, Error, Flags, Result};
use freestone_core::sync::{Instant, MutexGuard};

/// What is written or read at a time when the power is off.
const RUN_MAX_BYTES: u64 = 1 << 20;
/// How long the device below may answer nothing of what it has, until a change of the power is
/// given up.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// While it lives the power is off: no request runs, none comes in, the device below has none.
struct Off<'a> {
    shared: &'a PowerShared,
    change: Option<MutexGuard<'a, ()>>,
}

impl Drop for Off<'_> {
    fn drop(&mut self) {
        let held = self.shared.power.open();
        // Whoever found it closed has looked at this.
        self.shared.wiping.store(0, SeqCst);
        self.change = None;
        for task in held {
            task();
        }
    }
}

impl PowerShared {
    /// Switches the power off. Requests that wait are answered `Gone`; those that the device below
    /// has are answered as it answers them. For a `wipe` they all go on until they are done, and
    /// who comes waits.
    ///
    /// # Errors
    /// [`Error::Gone`]: nothing of it is answered for [`QUIET_MAX`]. The power is on again, and nothing else has changed.
    fn switch_off(&self, wipe: bool) -> Result<Off<'_>> {
        let change = Some(self.change.lock());
        self.wiping.store(u32::from(wipe), SeqCst);
        let quiet = self.power.close_within(QUIET_MAX);
        let off = Off { shared: self, change };
        if !quiet {
            return Err(Error::Gone);
        }
        self.bell.listen();
        self.bell.ring_loud();
        let quiet = loop {
            let seen = self.bell.count();
            if self.in_flight.load(SeqCst) == 0 && self.queue.is_empty() {
                break true;
            }
            self.bell.wait_until(seen, Instant::now() + QUIET_MAX);
            if self.bell.count() == seen {
                break false;
            }
        };
        self.bell.leave();
        if quiet { Ok(off) } else { Err(Error::Gone) }
    }

    pub fn cut(self: &Arc<Self>, seed: u64) -> Result<Cut> {
        if self.countdown.is_half_set_back() {
            return Err(Error::Media);
        }
        self.let_go();
        let cut = self.lose(seed);
        self.stop_counting();
        cut
    }

    fn lose(&self, seed: u64) -> Result<Cut> {
        let _off = self.switch_off(false)?;
        let choice = Choice::new(seed);
        let mut cut = Cut { seed, kept_blocks: 0, lost_blocks: 0 };
        // Blocks that did not end as their newest version, which is what the recording has last.
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
        // A reboot takes nothing more.
        let flushed = self.inner.flush();
        written.and(flushed).map(|()| cut)
    }

    /// Writes what a cut keeps. What fails may have happened or not, and either is one of its
    /// possible ends; the recording has to look (`unsure`), and the first error is told.
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

    /// Records what a cut left where that is not what was written last, so that the log still
    /// replays to what is there.
    fn record_cut(&self, record: &Recorder, seed: u64, set_back: &[u64]) {
        if !record.is_running() {
            return;
        }
        record.note(&format!("power-cut {seed}"));
        let block = self.cache.block_bytes();
        let most = (RUN_MAX_BYTES / block) as usize;
        for run in set_back.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(most)) {
            record.wait_for_room();
            let mut data = vec![0; run.len() * block as usize];
            if let Err(error) = self.inner.read_at(run[0] * block, &mut data) {
                record.stop(&format!("after the power cut, what was left could not be read: {error}"));
                return;
            }
            record.push(run[0] * block, data.len() as u64, What::Data(data.into_boxed_slice()));
        }
        record.push(0, 0, What::Flush);
    }

    pub fn reset(&self, below: &dyn Fn() -> Result<()>) -> Result<()> {
        let _off = self.switch_off(true)?;
        self.cache.take();
        below()?;
        self.countdown.set_whole();
        if let Some(record) = &self.cache.record {
            record.note(log::BEGINNING);
        }
        Ok(())
    }

    pub fn visit(
        &self,
        point: &Point,
        cut: Option<u64>,
        reset: &dyn Fn() -> Result<()>,
    ) -> std::result::Result<Visited, RecordError> {
        let record = self.cache.record.as_ref().ok_or(RecordError::NotRecording)?;
        // A point that is not there, and a log that is damaged before it, cost nothing.
        let mut reader = Reader::open(record.path())?;
        let entries = match point {
            Point::Entry(asked) => *asked,
            Point::Mark(text) => reader.find_mark(text)? + 1,
        };
        let cut = cut.map(|seed| (seed, self.cache.unit_bytes()));
        let plan = log::Plan::new(&mut reader, entries, self.inner.geometry().size, cut)?;
        let _off = self.switch_off(false)?;
        self.cache.take();
        record.stop("a point of the past was visited");
        let replayed =
            reset().map_err(RecordError::Device).and_then(|()| Ok(plan.run(&mut reader, &*self.inner)?));
        match replayed {
            Ok(cut) => {
                self.countdown.set_whole();
                Ok(Visited { entries, cut })
            }
            Err(error) => {
                refuse(self.countdown.stay_off());
                Err(RecordError::HalfSetBack(Box::new(error)))
            }
        }
    }
}

/// The moment up to which the writes to a unit happened, of which `parts` are unflushed.
fn decide(choice: Choice, unit: u64, parts: &[(u64, Block)], cut: &mut Cut) -> u64 {
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

/// So that the worker's thread may be started with it.
const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Arc<PowerShared>>();
};
