//! Durable state of the zones: for each zone a write pointer that never exceeds durable data.
//!
//! A flush collects the write pointers, flushes the device below, and then records them as durable.
//! With a state file it writes them to the file first. A reset is made durable before anything
//! else. Flushes and resets may overlap; the generation of each zone shows which one is newer.
//!
//! A failed write of the state file may have happened. The zones then count as durable as before,
//! and the file's content is suspect. The next operation that makes anything durable, even a flush,
//! rewrites the suspect part or fails.

use std::sync::Arc;

use super::file::{StateError, StateFile};
use super::mark::Mark;
use super::states::Table;
use super::word::Word;
use super::{Inner, ZoneCondition};
use freestone_core::client_log;
use freestone_core::device::{Blocking, Error, Flags, Request, Result, Tried};
use freestone_core::sync::Mutex;

/// A zone, its generation, and the mark to make durable.
pub type Noted = (u32, u16, Mark);

pub struct Durable {
    /// Lock order: innermost. With a state file the lock is held during its writes, by threads that
    /// may wait.
    kept: Mutex<Kept>,
    pub has_file: bool,
}

struct Kept {
    /// Durable generation and mark of each zone.
    zones: Vec<(u16, Mark)>,
    file: Option<StateFile>,
}

impl Kept {
    fn is_news(&self, &(zone, generation, mark): &Noted) -> bool {
        let (kept, durable) = self.zones[zone as usize];
        match generation.wrapping_sub(kept) as i16 {
            0 => mark > durable,
            newer => newer > 0,
        }
    }

    fn note(&self, table: &Table) -> Vec<Noted> {
        let layout = &table.layout;
        (layout.conventional..layout.zones)
            .map(|zone| {
                let word = table.look(zone);
                (zone, word.generation(), Mark::of(word))
            })
            .filter(|noted| self.is_news(noted))
            .collect()
    }

    /// Returns true if the content of the file is known.
    fn is_certain(&self) -> bool {
        self.file.as_ref().is_none_or(StateFile::is_certain)
    }

    /// Records newer marks (or `all`) and writes them to the file, together with its suspect part.
    /// After an error none of them counts as durable.
    fn take(&mut self, noted: Vec<Noted>, all: bool) -> Result<()> {
        let mut before = Vec::new();
        for noted in noted {
            if all || self.is_news(&noted) {
                let (zone, generation, mark) = noted;
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
    /// Creates the state: all zones are durable as in the table.
    pub fn new(table: &Table, file: Option<StateFile>) -> Self {
        let zones = (0..table.layout.zones).map(|zone| (0, Mark::of(table.look(zone)))).collect();
        Self { has_file: file.is_some(), kept: Mutex::new(Kept { zones, file }) }
    }

    /// Returns the marks that are not durable yet.
    pub fn note(&self, table: &Table) -> Vec<Noted> {
        self.kept.lock().note(table)
    }

    /// Returns the marks like [`note`](Self::note), or `None` if that would wait or the file must
    /// be written.
    fn try_note(&self, table: &Table) -> Option<Vec<Noted>> {
        let kept = self.kept.try_lock()?;
        let noted = kept.note(table);
        (!self.has_file || noted.is_empty() && kept.is_certain()).then_some(noted)
    }

    /// Records marks collected before a flush of the device below. May wait if there is a file.
    pub fn commit(&self, noted: Vec<Noted>) -> Result<()> {
        self.kept.lock().take(noted, false)
    }

    /// Records a newer mark of one zone. Only for devices without a file, so this cannot fail.
    fn raise(&self, noted: Noted) {
        debug_assert!(!self.has_file);
        let mut kept = self.kept.lock();
        if kept.is_news(&noted) {
            kept.zones[noted.0 as usize] = (noted.1, noted.2);
        }
    }

    /// Records marks of zones that the caller owns, newer or not. May wait if there is a file.
    pub fn force(&self, marks: Vec<Noted>) -> Result<()> {
        self.kept.lock().take(marks, true)
    }

    pub fn mark(&self, zone: u32) -> Mark {
        self.kept.lock().zones[zone as usize].1
    }
}

impl Inner {
    /// Returns true if the zones have a state file.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.durable.as_ref().is_some_and(|durable| durable.has_file)
    }

    /// Records that a write with [`Flags::FUA`] is durable, and so is all data before it in its
    /// zone.
    #[inline]
    pub fn wrote_through(&self, zone: u32, word: Word, request: &Request) {
        if let Some(durable) = &self.durable
            && request.flags.contains(Flags::FUA)
        {
            durable.raise((zone, word.generation(), Mark::of(word)));
        }
    }

    pub fn try_flush(&self, request: &Request) -> Result<Tried> {
        let Some(durable) = &self.durable else {
            return self.backing.try_io(request, freestone_core::device::Buffer::None);
        };
        let Some(noted) = durable.try_note(&self.table) else { return Ok(Tried::WouldBlock) };
        let tried = self.backing.try_io(request, freestone_core::device::Buffer::None)?;
        // Without new marks this does not wait for the lock.
        if tried == Tried::Done && !noted.is_empty() {
            durable.commit(noted)?;
        }
        Ok(tried)
    }

    /// Flushes the device below, then makes the marks durable. Blocks.
    pub fn sync(&self) -> Result<()> {
        let noted = self.durable.as_ref().map(|durable| (durable, durable.note(&self.table)));
        self.backing.flush()?;
        noted.map_or(Ok(()), |(durable, noted)| durable.commit(noted))
    }

    /// Runs [`sync`](Self::sync) on its thread, then calls `done`. Concurrent calls share one sync.
    pub fn sync_later(self: &Arc<Self>, done: impl FnOnce(Result<()>) + Send + 'static) {
        self.unsynced.lock().push(Box::new(done));
        let inner = Arc::clone(self);
        let taken = self.syncer.offer(move || {
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
            // The device is gone. Dropping the callbacks reports that.
            let waiting = std::mem::take(&mut *self.unsynced.lock());
            drop(waiting);
        }
    }
}

/// Converts the marks of a state file to words.
pub fn words(layout: &super::layout::Layout, marks: &[Mark]) -> std::result::Result<Vec<Word>, StateError> {
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
