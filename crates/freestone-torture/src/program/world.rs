//! The devices that are served, with what they may hold, and what all threads of a run share.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use super::asleep::Asleep;
use super::link::Place;
use super::watch::Watch;
use crate::oracle::{Durability, Fill, Oracle, ReadToken, SECTOR_BYTES};

/// Verbs that are told with a failure.
const HISTORY_MAX: usize = 60;
/// Machines that wait for their disk at most.
const ASLEEP_MAX: usize = 8;

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
    /// What `serve` is told of it.
    pub words: Option<String>,
    /// The verb that made it, where one did.
    pub made_by: String,
    /// The words of every life; others were made by a verb.
    pub from_start: bool,
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
            writable: !matches!(kind, Kind::Base | Kind::Frozen),
            block: SECTOR_BYTES as u64,
            cut: false,
            faults: false,
            spills: false,
            kept: false,
            words: None,
            made_by: String::new(),
            from_start: false,
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
        if state.closed > 0 || state.removed { Vec::new() } else { state.at.clone() }
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
        self.state().at.clear();
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
    /// anything.
    pub fn again(&self, killed: bool, of: Option<Arc<Disk>>, at: Place) -> Self {
        let mut oracle = self.oracle();
        let (name, size) = (self.name.as_str(), oracle.size());
        let fresh = match self.kind {
            Kind::File | Kind::Cow | Kind::Base if self.kept => {
                if !killed {
                    let flush = oracle.begin_flush();
                    oracle.end_flush(flush, true);
                }
                oracle.crash();
                oracle.clone()
            }
            _ => match &of {
                Some(of) => of.oracle().snapshot(name, self.durability()),
                None => Oracle::new(name, size, self.durability()),
            },
        };
        drop(oracle);
        let (tight, fails) = {
            let state = self.state();
            (state.tight, state.fails)
        };
        let state = State { at: vec![at], tight, fails, ..State::default() };
        let (merging, words) = (self.is_merging(), self.words.clone());
        Self {
            of,
            writable: self.writable,
            block: self.block,
            cut: self.cut,
            faults: self.faults,
            spills: self.spills,
            kept: self.kept,
            words,
            made_by: self.made_by.clone(),
            from_start: self.from_start,
            merged_before: merging,
            // What a snapshot shows whose merge goes on is its origin's affair.
            state: Mutex::new(State { merging, closed: u32::from(merging), ..state }),
            ..Self::new(name, self.kind, fresh, Vec::new())
        }
    }
}

/// What went wrong first.
#[derive(Debug, Clone)]
pub struct Trouble {
    pub what: String,
    /// What all threads did just then.
    pub running: String,
}

/// Counts of what happened.
#[derive(Default)]
pub struct Counts(Mutex<BTreeMap<(&'static str, String), u64>>);

impl Counts {
    pub fn add(&self, group: &'static str, name: impl Into<String>, count: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((group, name.into())).or_default() += count;
    }

    /// The largest number that was told.
    pub fn most(&self, group: &'static str, name: &str, number: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let most = counts.entry((group, name.to_owned())).or_default();
        *most = number.max(*most);
    }

    pub fn of(&self, group: &str) -> BTreeMap<String, u64> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .iter()
            .filter(|((of, _), _)| *of == group)
            .map(|((_, name), count)| (name.clone(), *count))
            .collect()
    }
}

/// What the threads of a run share.
pub struct World {
    pub program: PathBuf,
    /// The kernel has block devices for us.
    pub has_ublk: bool,
    /// The directory of this round.
    pub dir: Mutex<PathBuf>,
    disks: Mutex<Vec<Arc<Disk>>>,
    /// Machines that wait for their disk.
    asleep: Mutex<Vec<Asleep>>,
    /// Threads begin nothing any more.
    stop: AtomicBool,
    /// The server is being killed or ended: connections end for no other reason.
    dying: AtomicBool,
    /// Held for reading by a verb in the middle of which nobody may kill the server.
    pub steady: RwLock<()>,
    trouble: Mutex<Option<Trouble>>,
    /// The last verbs.
    history: Mutex<VecDeque<String>>,
    pub counts: Counts,
    pub watch: Watch,
    numbers: AtomicU64,
}

impl World {
    pub fn new(program: &Path) -> Self {
        Self {
            program: program.to_owned(),
            has_ublk: std::fs::File::options().read(true).write(true).open("/dev/ublk-control").is_ok(),
            dir: Mutex::new(PathBuf::new()),
            disks: Mutex::new(Vec::new()),
            asleep: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            dying: AtomicBool::new(false),
            steady: RwLock::new(()),
            trouble: Mutex::new(None),
            history: Mutex::new(VecDeque::new()),
            counts: Counts::default(),
            watch: Watch::default(),
            numbers: AtomicU64::new(0),
        }
    }

    pub fn dir(&self) -> PathBuf {
        self.dir.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_dir(&self, dir: &Path) {
        dir.clone_into(&mut self.dir.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn control(&self) -> PathBuf {
        self.dir().join(super::server::CONTROL)
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Disk>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that `fits` likes.
    pub fn disks(&self, fits: impl Fn(&Disk) -> bool) -> Vec<Arc<Disk>> {
        self.list().iter().filter(|disk| fits(disk)).cloned().collect()
    }

    pub fn set_disks(&self, disks: Vec<Arc<Disk>>) {
        *self.list() = disks;
    }

    pub fn add(&self, disk: Disk) -> Arc<Disk> {
        let disk = Arc::new(disk);
        self.list().push(Arc::clone(&disk));
        disk
    }

    pub fn forget(&self, disk: &Arc<Disk>) {
        disk.remove();
        self.list().retain(|other| !Arc::ptr_eq(other, disk));
    }

    /// A machine whose connection was ended waits until it can connect again. Those that have waited
    /// longest give up.
    pub fn falls_asleep(&self, machine: Asleep) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        if asleep.len() == ASLEEP_MAX {
            asleep.remove(0);
        }
        asleep.push(machine);
    }

    /// One that waits for this device.
    pub fn wakes(&self, disk: &str) -> Option<Asleep> {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let at = asleep.iter().position(|machine| machine.disk == disk)?;
        Some(asleep.remove(at))
    }

    /// Whether one waits for this device.
    pub fn is_missed(&self, disk: &Disk) -> bool {
        let asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        asleep.iter().any(|machine| machine.disk == disk.name)
    }

    /// All give up: there are other devices now.
    pub fn forget_machines(&self) {
        self.asleep.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// A number that nobody had yet.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The id of a write that nobody had yet.
    pub fn write_id(&self, fill: Fill) -> u64 {
        fill.id(self.number())
    }

    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub fn set_stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::SeqCst);
    }

    pub fn dying(&self) -> bool {
        self.dying.load(Ordering::SeqCst)
    }

    pub fn set_dying(&self, dying: bool) {
        self.dying.store(dying, Ordering::SeqCst);
    }

    /// Something is wrong; the first to say so is heard.
    pub fn fail(&self, what: impl Into<String>) {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if trouble.is_none() {
            let mut running = self.watch.all();
            running += "  the last verbs:\n";
            for verb in self.history.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                let _ = writeln!(running, "    {verb}");
            }
            *trouble = Some(Trouble { what: what.into(), running });
        }
        drop(trouble);
        self.set_stop(true);
    }

    /// A verb was answered.
    pub fn note(&self, verb: String) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        if history.len() == HISTORY_MAX {
            history.pop_front();
        }
        history.push_back(verb);
    }

    pub fn trouble(&self) -> Option<Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
