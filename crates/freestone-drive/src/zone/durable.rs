//! What of the zones would survive a power cut: for each zone a write pointer that never exceeds
//! durable data.
//!
//! A flush notes the write pointers, flushes the device below, and then takes what it noted for
//! durable; with a state file, after that is in the file. A reset is made durable first of all. So
//! two of them can overlap, and each zone's generation tells which one is newer.
//!
//! A write of the state file that failed may have happened. For us the zones are then as durable as
//! they were before, and what the file says of them is suspect: whatever is made durable next, if
//! only by a flush, has that written again as well, or fails too.

use std::sync::Arc;

use super::file::{StateError, StateFile};
use super::mark::Mark;
use super::states::Table;
use super::word::Word;
use super::{Inner, ZoneCondition};
use freestone_core::client_log;
use freestone_core::device::{Blocking, Error, Flags, Request, Result, Tried};
use freestone_core::sync::Mutex;

/// A zone, a generation of it, and what is to become durable of that.
pub type Noted = (u32, u16, Mark);

/// What is durable of all zones.
pub struct Durable {
    /// Innermost. With a state file it is held while that is written: by threads that may wait.
    kept: Mutex<Kept>,
    pub has_file: bool,
}

struct Kept {
    /// Of each zone the generation that is durable, and the mark.
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

    /// Whether the file says what is known here.
    fn is_certain(&self) -> bool {
        self.file.as_ref().is_none_or(StateFile::is_certain)
    }

    /// Takes over what is news, and has it durable in the file, with all that is suspect there. If
    /// that fails, nothing of it is known to be durable.
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
    /// All zones are durable as they are in the table.
    pub fn new(table: &Table, file: Option<StateFile>) -> Self {
        let zones = (0..table.layout.zones).map(|zone| (0, Mark::of(table.look(zone)))).collect();
        Self { has_file: file.is_some(), kept: Mutex::new(Kept { zones, file }) }
    }

    /// What is not durable yet.
    pub fn note(&self, table: &Table) -> Vec<Noted> {
        self.kept.lock().note(table)
    }

    /// As [`note`](Self::note), unless that would wait, or there is something to write.
    fn try_note(&self, table: &Table) -> Option<Vec<Noted>> {
        let kept = self.kept.try_lock()?;
        let noted = kept.note(table);
        (!self.has_file || noted.is_empty() && kept.is_certain()).then_some(noted)
    }

    /// The device below was flushed after this was noted. May wait where there is a file.
    pub fn commit(&self, noted: Vec<Noted>) -> Result<()> {
        self.kept.lock().take(noted, false)
    }

    /// A single zone is durable up to here. For devices without a file, where nothing can fail.
    fn raise(&self, noted: Noted) {
        debug_assert!(!self.has_file);
        let mut kept = self.kept.lock();
        if kept.is_news(&noted) {
            kept.zones[noted.0 as usize] = (noted.1, noted.2);
        }
    }

    /// Makes this durable, whatever it was before: for who owns the zones. May wait where there is
    /// a file.
    pub fn force(&self, marks: Vec<Noted>) -> Result<()> {
        self.kept.lock().take(marks, true)
    }

    /// What is durable of a zone.
    pub fn mark(&self, zone: u32) -> Mark {
        self.kept.lock().zones[zone as usize].1
    }
}

impl Inner {
    /// Whether the zones are kept in a state file.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.durable.as_ref().is_some_and(|durable| durable.has_file)
    }

    /// After a write with [`Flags::FUA`]: a power cut keeps it, and so what lies below it in its
    /// zone.
    #[inline]
    pub fn wrote_through(&self, zone: u32, word: Word, request: &Request) {
        if let Some(durable) = &self.durable
            && request.flags.contains(Flags::FUA)
        {
            durable.raise((zone, word.generation(), Mark::of(word)));
        }
    }

    /// Flushes without waiting.
    pub fn try_flush(&self, request: &Request) -> Result<Tried> {
        let Some(durable) = &self.durable else {
            return self.backing.try_io(request, freestone_core::device::Buffer::None);
        };
        let Some(noted) = durable.try_note(&self.table) else { return Ok(Tried::WouldBlock) };
        let tried = self.backing.try_io(request, freestone_core::device::Buffer::None)?;
        // With nothing to take over, the lock is not waited for.
        if tried == Tried::Done && !noted.is_empty() {
            durable.commit(noted)?;
        }
        Ok(tried)
    }

    /// Makes durable what was written, and then what is known of it. Waits.
    pub fn sync(&self) -> Result<()> {
        let noted = self.durable.as_ref().map(|durable| (durable, durable.note(&self.table)));
        self.backing.flush()?;
        noted.map_or(Ok(()), |(durable, noted)| durable.commit(noted))
    }

    /// Has [`sync`](Self::sync) done by the thread for it, and then tells. Those that come while it
    /// is busy are done together.
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
            // The device is gone. Each is answered so by being dropped.
            let waiting = std::mem::take(&mut *self.unsynced.lock());
            drop(waiting);
        }
    }
}

/// What a state file says of the zones, as words.
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
