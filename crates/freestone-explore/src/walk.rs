//! A walk over the log: applies its entries to one disk, forward, and makes states on the way.

use std::sync::Arc;

use freestone_core::device::{Blocking as _, Device as _, ExtentKind, Flags};
use freestone_drive::power::log::{Entry, RESET_MARK, Reader};
use freestone_ram::ram::{OverBaseView, Ram};

use crate::digest::Digest;
use crate::epoch::{Epoch, Write};
use crate::state::{State, Window};
use crate::timeline::Timeline;
use crate::{Result, failed};

/// Largest part of an entry that is applied at once, in bytes; a multiple of every unit.
const CHUNK_BYTES: u64 = 1 << 20;

/// A disk that moves through the log.
pub struct Walk {
    timeline: Arc<Timeline>,
    reader: Reader,
    disk: Ram,
    /// Digest of the disk's content, in units of `digest_unit` bytes.
    digest: Digest,
    digest_unit: u64,
    /// Unflushed writes, for each unit in which writes are lost.
    epochs: Vec<Epoch>,
    /// Content at the last flush. None if nothing is lost in this walk.
    flushed: Option<Ram>,
    mark: Option<Arc<str>>,
    point: u64,
}

impl Walk {
    /// Starts a walk before the first entry. `units` are the sizes of blocks in which writes are lost;
    /// without one, the walk has no windows. Digests of walks with the same `digest_unit` are equal
    /// for equal content. `digest_unit` divides all units.
    pub fn new(timeline: &Arc<Timeline>, units: &[u64], digest_unit: u64) -> Result<Self> {
        let disk = timeline.disk()?;
        let flushed = if units.is_empty() { None } else { Some(disk.snapshot()?) };
        Ok(Self {
            reader: timeline.reader()?,
            timeline: Arc::clone(timeline),
            disk,
            digest: Digest::default(),
            digest_unit,
            epochs: units.iter().map(|unit| Epoch::new(*unit)).collect(),
            flushed,
            mark: None,
            point: 0,
        })
    }

    /// Applies entries until the state after `point` entries is reached.
    pub fn advance(&mut self, point: u64) -> Result<()> {
        while self.point < point {
            let Some(entry) = self.reader.next_entry()? else { break };
            self.step(&entry)?;
        }
        Ok(())
    }

    /// Returns the state at the present point, with nothing lost.
    pub fn prefix(&self) -> Result<State> {
        Ok(State::prefix(self.point, self.digest, self.mark.clone(), self.disk.snapshot()?))
    }

    /// Returns the content at the present point, whose changes are those over the base.
    pub fn over_base(&self) -> Result<OverBaseView> {
        Ok(self.disk.snapshot()?.over_base()?)
    }

    /// Returns the disk at the present point.
    pub const fn disk(&self) -> &Ram {
        &self.disk
    }

    /// Returns the identity of [`prefix`](Self::prefix).
    pub fn identity(&self) -> u128 {
        self.digest.with_mark(self.mark.as_deref())
    }

    /// Returns the present point with the writes that can be lost in blocks of `unit` bytes.
    ///
    /// # Panics
    /// If the walk was not created with this unit.
    pub fn window(&self, unit: u64) -> Result<Arc<Window>> {
        let epoch = self.epochs.iter().find(|epoch| epoch.unit == unit);
        let (Some(epoch), Some(flushed)) = (epoch, &self.flushed) else {
            panic!("the walk does not lose blocks of {unit} bytes");
        };
        Ok(Arc::new(Window {
            point: self.point,
            mark: self.mark.clone(),
            epoch: epoch.clone(),
            digest: self.digest,
            newest: self.disk.snapshot()?,
            flushed: flushed.clone(),
            timeline: Arc::clone(&self.timeline),
        }))
    }

    fn step(&mut self, entry: &Entry) -> Result<()> {
        self.point = entry.number + 1;
        self.epochs.iter_mut().for_each(Epoch::settle);
        match entry.mark.as_deref() {
            Some(RESET_MARK) => {
                self.disk.rewind()?;
                self.digest = Digest::default();
                self.begin_epoch()?;
            }
            Some(text) => self.mark = Some(text.into()),
            None => {}
        }
        if entry.is_flush() {
            self.begin_epoch()?;
        }
        if entry.len > 0 {
            self.apply(entry)?;
        }
        Ok(())
    }

    fn begin_epoch(&mut self) -> Result<()> {
        if self.flushed.is_some() {
            self.flushed = Some(self.disk.snapshot()?);
        }
        for epoch in &mut self.epochs {
            *epoch = Epoch::new(epoch.unit);
        }
        Ok(())
    }

    fn apply(&mut self, entry: &Entry) -> Result<()> {
        let is_bulk = self.timeline.is_bulk(entry);
        for epoch in &mut self.epochs {
            epoch.begin(Write { entry: entry.clone(), mark: self.mark.clone(), is_bulk });
        }
        // Blocks are read, hashed and recorded whole.
        let align = self.epochs.iter().map(|epoch| epoch.unit).fold(self.digest_unit, u64::max);
        let end = entry.offset + entry.len;
        let mut at = entry.offset / align * align;
        while at < end {
            let next = (at + CHUNK_BYTES).min(end.next_multiple_of(align)).min(self.timeline.size());
            self.apply_chunk(entry, at, next)?;
            at = next;
        }
        Ok(())
    }

    /// Applies the part of an entry that lies in `start..end`, a range of whole blocks.
    fn apply_chunk(&mut self, entry: &Entry, start: u64, end: u64) -> Result<()> {
        if entry.is_discard() && self.reads_as_zeroes(start, end)? {
            return Ok(());
        }
        let what = || format!("applying entry {}", entry.number + 1);
        let mut before = vec![0; (end - start) as usize];
        self.disk.read_at(start, &mut before).map_err(failed(what()))?;
        let mut after = before.clone();
        let (from, to) = (start.max(entry.offset), end.min(entry.offset + entry.len));
        let part = &mut after[(from - start) as usize..(to - start) as usize];
        if entry.is_discard() {
            part.fill(0);
        } else {
            self.timeline.data().read_data(entry, from - entry.offset, part)?;
        }
        let written = if part.iter().all(|byte| *byte == 0) {
            self.disk.write_zeroes(from, to - from, Flags::MAY_FREE)
        } else {
            self.disk.write_at(from, part, Flags::empty())
        };
        written.map_err(failed(what()))?;
        let unit = self.digest_unit;
        let digest = |content: &[u8], at| Digest::of(at, unit, content);
        self.digest = self.digest.plus(digest(&after, start)).minus(digest(&before, start));
        for epoch in &mut self.epochs {
            let block_bytes = epoch.unit;
            for block in from / block_bytes..to.div_ceil(block_bytes) {
                let at = block * block_bytes;
                let range = (at - start) as usize..((at + block_bytes).min(end) - start) as usize;
                epoch.push(block, digest(&before[range.clone()], at), digest(&after[range], at))?;
            }
        }
        Ok(())
    }

    /// Returns true if a range reads as zeroes, so that a discard of it changes nothing.
    fn reads_as_zeroes(&self, start: u64, end: u64) -> Result<bool> {
        let (mut at, mut is_zero) = (start, true);
        while at < end && is_zero {
            let row = &mut |extent: freestone_core::device::Extent| {
                is_zero &= extent.kind != ExtentKind::Data;
                is_zero
            };
            at += self.disk.extents(at, end - at, row).map_err(failed("reading extents"))?;
        }
        Ok(is_zero)
    }
}
