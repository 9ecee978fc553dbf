//! Durable state of the zones: for each zone, a mark whose write pointer never exceeds the durable
//! data.
//!
//! A flush collects the write pointers, flushes the device under this layer, and then records the
//! write pointers as durable. With a state file, it writes them to the file first. A reset is made
//! durable before the zone changes. Flushes and resets may overlap; the generation of each zone
//! shows which is newer.
//!
//! If a write of the state file fails, the file may contain the old or the new marks. The old marks
//! then remain the durable state, and the written part of the file is suspect. The next operation
//! that makes anything durable, even a flush, rewrites the suspect part or fails.

pub(super) mod file;
pub(super) mod mark;

use std::sync::Arc;

use crate::zone::table::Table;
use crate::zone::table::layout::Layout;
use crate::zone::table::word::Word;
use crate::zone::{Inner, ZoneCondition};
use file::{StateError, StateFile};
use freestone_core::client_log;
use freestone_core::device::{Blocking, Error, Flags, Request, Result, TryResult};
use freestone_core::sync::Mutex;
use mark::Mark;

/// Number of a zone, its generation, and the mark to make durable.
pub type PendingMark = (u32, u16, Mark);

pub struct Durable {
    /// Lock order: innermost. If there is a state file, the lock is held while the file is written,
    /// only by threads that may wait.
    kept: Mutex<DurableMarks>,
    pub has_file: bool,
}

struct DurableMarks {
    /// Generation and durable mark of each zone.
    zones: Vec<(u16, Mark)>,
    file: Option<StateFile>,
}

impl DurableMarks {
    fn is_newer(&self, &(zone, generation, mark): &PendingMark) -> bool {
        let (kept, durable) = self.zones[zone as usize];
        match generation.wrapping_sub(kept) as i16 {
            0 => mark > durable,
            newer => newer > 0,
        }
    }

    fn note(&self, table: &Table) -> Vec<PendingMark> {
        let layout = &table.layout;
        (layout.conventional..layout.zones)
            .map(|zone| {
                let word = table.load(zone);
                (zone, word.generation(), Mark::of(word))
            })
            .filter(|pending| self.is_newer(pending))
            .collect()
    }

    /// Returns true if no part of the state file is suspect after a failed write.
    fn is_certain(&self) -> bool {
        self.file.as_ref().is_none_or(StateFile::is_certain)
    }

    /// Records the pending marks that are newer than the durable ones, or with `all` every pending
    /// mark. Writes them to the state file, together with its suspect part. After an error, none of
    /// them counts as durable.
    fn take(&mut self, pending: Vec<PendingMark>, all: bool) -> Result<()> {
        let mut before = Vec::new();
        for pending in pending {
            if all || self.is_newer(&pending) {
                let (zone, generation, mark) = pending;
                let kept = std::mem::replace(&mut self.zones[zone as usize], (generation, mark));
                before.push((zone, kept));
            }
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let changed = before.iter().filter(|&&(zone, (_, mark))| self.zones[zone as usize].1 != mark);
        let changed = changed.map(|&(zone, _)| zone);
        if let Err(error) = file.write(changed, |zone| self.zones[zone as usize].1) {
            client_log!(warn, "the state of zones cannot be written: {error}");
            for (zone, kept) in before {
                self.zones[zone as usize] = kept;
            }
            return Err(Error::Media);
        }
        Ok(())
    }
}

impl Durable {
    /// Creates the durable state. The durable marks are initially those of the zone table.
    pub fn new(table: &Table, file: Option<StateFile>) -> Self {
        let zones = (0..table.layout.zones).map(|zone| (0, Mark::of(table.load(zone)))).collect();
        Self { has_file: file.is_some(), kept: Mutex::new(DurableMarks { zones, file }) }
    }

    /// Returns the current marks of the zones that are newer than the durable ones.
    pub fn note(&self, table: &Table) -> Vec<PendingMark> {
        self.kept.lock().note(table)
    }

    /// Returns the same marks as [`note`](Self::note). Returns `None` if that would wait for the
    /// lock, or the state file must be written.
    fn try_note(&self, table: &Table) -> Option<Vec<PendingMark>> {
        let kept = self.kept.try_lock()?;
        let pending = kept.note(table);
        (!self.has_file || pending.is_empty() && kept.is_certain()).then_some(pending)
    }

    /// Records marks that were collected before a flush of the device under this layer. Blocks if
    /// there is a state file.
    pub fn commit(&self, pending: Vec<PendingMark>) -> Result<()> {
        self.kept.lock().take(pending, false)
    }

    /// Records the mark of one zone if it is newer. Only for devices without a state file, so this
    /// cannot fail.
    fn raise(&self, pending: PendingMark) {
        debug_assert!(!self.has_file);
        let mut kept = self.kept.lock();
        if kept.is_newer(&pending) {
            kept.zones[pending.0 as usize] = (pending.1, pending.2);
        }
    }

    /// Records marks of zones that the caller owns, whether they are newer or not. Blocks if there
    /// is a state file.
    pub fn force(&self, marks: Vec<PendingMark>) -> Result<()> {
        self.kept.lock().take(marks, true)
    }

    pub fn mark(&self, zone: u32) -> Mark {
        self.kept.lock().zones[zone as usize].1
    }
}

impl Inner {
    /// Returns true if the state of the zones is stored in a state file or on a device.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.durable.as_ref().is_some_and(|durable| durable.has_file)
    }

    /// Records that a write with [`Flags::FUA`], and all data before it in the zone, is durable.
    /// Does nothing for other writes.
    #[inline]
    pub fn record_fua_write(&self, zone: u32, word: Word, request: &Request) {
        if let Some(durable) = &self.durable
            && request.flags.contains(Flags::FUA)
        {
            durable.raise((zone, word.generation(), Mark::of(word)));
        }
    }

    pub fn try_flush(&self, request: &Request) -> Result<TryResult> {
        let Some(durable) = &self.durable else {
            return self.backing.try_io(request, freestone_core::device::Buffer::None);
        };
        let Some(pending) = durable.try_note(&self.table) else { return Ok(TryResult::WouldBlock) };
        let tried = self.backing.try_io(request, freestone_core::device::Buffer::None)?;
        // If there are no new marks, taking the lock is avoided.
        if tried == TryResult::Done && !pending.is_empty() {
            durable.commit(pending)?;
        }
        Ok(tried)
    }

    /// Flushes the device under this layer, then makes the marks of all zones durable. Blocks.
    pub fn sync(&self) -> Result<()> {
        let pending = self.durable.as_ref().map(|durable| (durable, durable.note(&self.table)));
        self.backing.flush()?;
        pending.map_or(Ok(()), |(durable, pending)| durable.commit(pending))
    }

    /// Runs [`sync`](Self::sync) on the thread of `syncer`, then calls `done` with the result.
    /// Concurrent calls share one sync.
    pub fn sync_later(self: &Arc<Self>, done: impl FnOnce(Result<()>) + Send + 'static) {
        self.unsynced.lock().push(Box::new(done));
        let inner = Arc::clone(self);
        let taken = self.syncer.try_push(move || {
            let waiting = std::mem::take(&mut *inner.unsynced.lock());
            if waiting.is_empty() {
                return;
            }
            let outcome = inner.sync();
            for done in waiting {
                done(outcome);
            }
        });
        if !taken {
            // The device is being dropped. Dropping the callbacks fails their requests with
            // [`Error::Gone`].
            let waiting = std::mem::take(&mut *self.unsynced.lock());
            drop(waiting);
        }
    }
}

/// Converts the marks of a state file to state words of the zones. Fails if a mark is impossible
/// for its zone.
pub fn words(layout: &Layout, marks: &[Mark]) -> std::result::Result<Vec<Word>, StateError> {
    let word = |(zone, mark): (u32, &Mark)| {
        if !layout.is_sequential(zone) {
            let free = *mark == Mark::EMPTY;
            return free
                .then(|| Word::new(ZoneCondition::NotWritePointer, 0))
                .ok_or(StateError::BadMark(zone));
        }
        let word = mark.word(layout.capacity(zone), layout.len(zone), u64::from(layout.block));
        word.ok_or(StateError::BadMark(zone))
    };
    (0..).zip(marks).map(word).collect()
}
