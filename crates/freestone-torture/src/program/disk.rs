//! A device that is served, with what it may hold, and what changes while it lives.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use super::link::Place;
use crate::oracle::{Durability, Oracle, ReadToken, SECTOR_BYTES};

/// Tags of the store of images, which verbs set.
pub const TAGS: [&str; 3] = ["a", "b", "c"];

/// An image that a tag may say, and what it shows.
pub struct May {
    /// Where the push was answered.
    pub image: Option<String>,
    pub oracle: Oracle,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A RAM disk, or one that was restored.
    Ram,
    /// A test drive with memory.
    Null,
    /// A writable file.
    File,
    /// A read-only file, for forks.
    Base,
    /// An image in a store.
    Image,
    /// A fork.
    Fork,
    /// A snapshot of a RAM disk or fork.
    Frozen,
    /// A snapshot of a file.
    Cow,
    /// A fork for every connection.
    Template,
    /// A fork that was saved, and stands on what was saved with it.
    Restored,
}

/// A device, and what is known of it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a property of its own, and any of them go together"
)]
pub struct Disk {
    pub name: String,
    pub kind: Kind,
    /// What it was made of.
    pub of: Option<Arc<Disk>>,
    /// Clients may write.
    pub writable: bool,
    /// Requests are multiples of this many bytes.
    pub block: u64,
    /// It loses what is not flushed when its power is cut, and with a file also when the server is
    /// killed.
    pub cut: bool,
    /// Faults were asked for, or can be set.
    pub faults: bool,
    /// It has a backing device.
    pub spills: bool,
    /// Its store of copies lies in a file: it is there again after a restart.
    pub kept: bool,
    /// Of an image: which one.
    pub image: Option<String>,
    /// What `serve` is told of it.
    pub words: Option<String>,
    /// The verb that made it, where one did.
    pub made_by: String,
    /// The words of every life; others were made by a verb.
    pub from_start: bool,
    /// What it holds or shows is in memory alone, and ends with the server.
    pub is_lost: bool,
    /// When its content is lost it is served without, and not withheld (`on_lost=empty`).
    pub serves_lost: bool,
    /// What it holds is saved when its server ends in order (`keep=yes`).
    pub keeps: bool,
    /// What it held when a server last ended so.
    pub saved: Option<Oracle>,
    /// It was merged, or going to be, when the server was started again: where that was finished,
    /// it is a new snapshot now.
    pub merged_before: bool,
    /// What it may hold.
    pub oracle: Mutex<Oracle>,
    /// Held for reading while a client has requests on their way; for writing by who must see none.
    pub gate: RwLock<()>,
    /// Held over `publish`, `unpublish` and `merge`: of two at once nobody could say which
    /// addresses are left, or which of them began the merge.
    pub publishing: Mutex<()>,
    /// What changes while it lives.
    pub state: Mutex<State>,
}

/// What of a device changes while it lives.
#[derive(Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a property of its own, and any of them go together"
)]
pub struct State {
    /// Where it is published.
    at: Vec<Place>,
    /// What a server with a state keeps of it.
    known: Known,
    /// ENOSPC may be the answer.
    tight: bool,
    /// EIO may be the answer, with the reason.
    fails: bool,
    /// Who wants that no client begins anything.
    closed: u32,
    /// Verbs under way that may end its connections, and how many there were.
    ending: u32,
    ended: u64,
    /// It is merged into its origin, or going to be.
    merging: bool,
    removed: bool,
    /// Verbs under way that replace its content.
    turning: u32,
    /// Reads that were answered meanwhile: they may show the new content already, and are judged
    /// when it is known.
    held: Vec<Held>,
}

/// What a server with a state keeps of a device, beside where it is published.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Where somebody has asked for it.
    pub uuid: Option<String>,
    /// How often its content was lost.
    pub losses: u64,
    /// Its own memory limit in bytes.
    pub limit: Option<u64>,
    /// The size that it was set to, in bytes.
    pub size: Option<u64>,
    /// It has lost its content, and nobody has said that it may be seen.
    pub withheld: bool,
}

/// A read that is judged later.
pub struct Held {
    pub read: ReadToken,
    pub first: u64,
    pub data: Vec<u8>,
    pub text: String,
}

/// What was known of a device's connections at one time.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    ended: u64,
    ending: bool,
}

impl Disk {
    /// A device that may hold what `oracle` says, published at `at`.
    pub fn new(name: &str, kind: Kind, oracle: Oracle, at: Vec<Place>) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            of: None,
            writable: !matches!(kind, Kind::Base | Kind::Image | Kind::Frozen),
            block: SECTOR_BYTES as u64,
            cut: false,
            faults: false,
            spills: false,
            kept: false,
            image: None,
            words: None,
            made_by: String::new(),
            from_start: false,
            is_lost: !matches!(kind, Kind::File | Kind::Base | Kind::Image | Kind::Template),
            serves_lost: false,
            keeps: false,
            saved: None,
            merged_before: false,
            oracle: Mutex::new(oracle),
            gate: RwLock::new(()),
            publishing: Mutex::new(()),
            state: Mutex::new(State { at, ..State::default() }),
        }
    }

    pub fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where clients find it now.
    pub fn addresses(&self) -> Vec<Place> {
        let state = self.state();
        if state.closed > 0 || state.removed || state.known.withheld { Vec::new() } else { state.at.clone() }
    }

    /// Where it is published, or will be once it is no longer withheld.
    pub fn places(&self) -> Vec<Place> {
        self.state().at.clone()
    }

    pub fn known(&self) -> Known {
        self.state().known.clone()
    }

    pub fn learn(&self, tell: impl FnOnce(&mut Known)) {
        tell(&mut self.state().known);
    }

    pub fn is_withheld(&self) -> bool {
        self.state().known.withheld
    }

    /// Where NBD clients find it.
    pub fn nbd(&self) -> Option<PathBuf> {
        self.addresses().into_iter().find_map(|place| match place {
            Place::Nbd(path) => Some(path),
            _ => None,
        })
    }

    /// Where virtual machines find it.
    pub fn machine(&self) -> Option<PathBuf> {
        self.addresses().into_iter().find_map(|place| match place {
            Place::Machine(path) => Some(path),
            _ => None,
        })
    }

    pub fn publish(&self, at: Place) {
        self.state().at.push(at);
    }

    pub fn unpublish(&self) {
        let mut state = self.state();
        state.at.clear();
        state.known.withheld = false;
    }

    /// No client begins anything until it is opened as often.
    pub fn close(&self) {
        self.state().closed += 1;
    }

    pub fn open(&self) {
        self.state().closed -= 1;
    }

    pub fn tight(&self, tight: bool) {
        self.state().tight = tight;
    }

    /// Its own limit, or that of its family.
    pub fn is_tight(&self) -> bool {
        self.state().tight || self.of.as_ref().is_some_and(|of| of.is_tight())
    }

    pub fn fails(&self, fails: bool) {
        self.state().fails = fails;
    }

    pub fn may_fail(&self) -> bool {
        self.state().fails
    }

    pub fn merging(&self) {
        self.state().merging = true;
    }

    pub fn is_merging(&self) -> bool {
        self.state().merging
    }

    pub fn remove(&self) {
        self.state().removed = true;
    }

    pub fn is_removed(&self) -> bool {
        self.state().removed
    }

    /// A verb that replaces its content begins.
    pub fn turns(&self) -> ReadToken {
        self.state().turning += 1;
        self.oracle().begin_read()
    }

    /// It was answered, and `tell` tells the oracle what the device holds now.
    ///
    /// # Errors
    /// What a read found meanwhile is neither the old content nor the new.
    pub fn turned(&self, tell: impl FnOnce(&mut Oracle)) -> Result<(), String> {
        let mut oracle = self.oracle();
        tell(&mut oracle);
        let held = {
            let mut state = self.state();
            state.turning -= 1;
            if state.turning > 0 { Vec::new() } else { std::mem::take(&mut state.held) }
        };
        for Held { read, first, data, text } in held {
            oracle.check_read(read, first, &data).map_err(|wrong| format!("{text}: {wrong}"))?;
        }
        Ok(())
    }

    /// Judges a read, or keeps it until a verb is answered.
    pub fn judge(&self, oracle: &mut Oracle, held: Held) -> Result<(), String> {
        let mut state = self.state();
        if state.turning > 0 {
            state.held.push(held);
            return Ok(());
        }
        drop(state);
        let Held { read, first, data, .. } = held;
        oracle.check_read(read, first, &data).map_err(|wrong| wrong.to_string())
    }

    /// What it holds since `verb` began, when it is known.
    pub fn taken(&self, verb: ReadToken, name: &str) -> Oracle {
        loop {
            let mut oracle = self.oracle();
            if self.state().turning == 0 {
                return oracle.snapshot_since(verb, name, Durability::Answered);
            }
            drop(oracle);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// How it came about.
    pub fn story(&self) -> String {
        let words = self.words.as_deref().unwrap_or(&self.made_by);
        let below = self.of.as_ref().map(|of| format!(", of {}", of.story())).unwrap_or_default();
        format!("{} ({words}{below})", self.name)
    }

    /// A verb that may end its connections begins.
    pub fn ends(&self) {
        let mut state = self.state();
        state.ending += 1;
        state.ended += 1;
    }

    /// It was answered.
    pub fn ended(&self) {
        self.state().ending -= 1;
    }

    pub fn mark(&self) -> Mark {
        let state = self.state();
        Mark { ended: state.ended, ending: state.ending > 0 }
    }

    /// Whether a connection that was made after `mark` may have been ended by a verb.
    pub fn may_have_ended(&self, mark: Mark) -> bool {
        let state = self.state();
        mark.ending || state.ended != mark.ended || state.removed
    }

    /// What it has after a loss of power.
    fn durability(&self) -> Durability {
        if self.cut { Durability::Flushed } else { Durability::Answered }
    }

    /// The same device when the server is started again. `killed`: without a chance to write
    /// anything. `size`: in sectors, where that is known.
    pub fn again(
        &self,
        killed: bool,
        of: Option<Arc<Disk>>,
        at: Vec<Place>,
        known: Known,
        size: Option<u64>,
    ) -> Self {
        let mut oracle = self.oracle();
        let name = self.name.as_str();
        let mut saved = self.saved.clone();
        let fresh = match self.kind {
            _ if self.keeps && !killed => {
                let flush = oracle.begin_flush();
                oracle.end_flush(flush, true);
                oracle.crash();
                oracle.grow(size.unwrap_or_default());
                saved = Some(oracle.clone());
                oracle.clone()
            }
            // It may have grown since.
            _ if self.saved.is_some() => {
                let mut fresh = self.saved.clone().expect("looked at just now");
                fresh.grow(size.unwrap_or_default());
                fresh
            }
            Kind::File | Kind::Cow | Kind::Base | Kind::Image if self.kept => {
                if !killed {
                    let flush = oracle.begin_flush();
                    oracle.end_flush(flush, true);
                }
                oracle.crash();
                oracle.clone()
            }
            _ => match &of {
                Some(of) => {
                    let mut fresh = of.oracle().snapshot(name, self.durability());
                    fresh.grow(size.unwrap_or_default());
                    fresh
                }
                None => Oracle::new(name, size.unwrap_or(oracle.size()), self.durability()),
            },
        };
        drop(oracle);
        let (tight, fails) = {
            let state = self.state();
            (state.tight, state.fails)
        };
        let state = State { at, known, tight, fails, ..State::default() };
        let (merging, words) = (self.is_merging(), self.words.clone());
        Self {
            of,
            writable: self.writable,
            block: self.block,
            cut: self.cut,
            faults: self.faults,
            spills: self.spills,
            kept: self.kept,
            image: self.image.clone(),
            words,
            made_by: self.made_by.clone(),
            from_start: self.from_start,
            is_lost: self.is_lost,
            serves_lost: self.serves_lost,
            keeps: self.keeps,
            saved,
            merged_before: merging,
            // What a snapshot shows whose merge goes on is its origin's affair.
            state: Mutex::new(State { merging, closed: u32::from(merging), ..state }),
            ..Self::new(name, self.kind, fresh, Vec::new())
        }
    }
}
