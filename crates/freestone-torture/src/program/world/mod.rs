//! The state shared by all threads of a run: devices, counters, and the first failure.
//!
//! Owns the expected state of each device and its oracle, the verbs that a kill has cut off, and the machines that
//! wait to reconnect. Uses only `server`, `transport` and `watch`; all threads of a run use it.

pub mod disk;
pub mod interrupted_verb;
pub mod requests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::watch::Watch;
use crate::oracle::Fill;
pub use disk::{ConnectionMark, ContentEnd, DeferredRead, Disk, Kind, KnownState, PossibleImage, TAGS};
use interrupted_verb::{Completions, InterruptedVerb};
use requests::WaitingMachine;

/// Number of verbs in the report of a failure.
const HISTORY_MAX: usize = 60;
/// Maximum number of virtual machines that wait to reconnect.
const ASLEEP_MAX: usize = 8;

#[derive(Debug, Clone)]
pub struct FirstFailure {
    pub what: String,
    /// Operations of all threads at the failure.
    pub running: String,
}

/// Counters of events, by group and name of the event.
#[derive(Default)]
pub struct Counts(Mutex<BTreeMap<(&'static str, String), u64>>);

impl Counts {
    pub fn add(&self, group: &'static str, name: impl Into<String>, count: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((group, name.into())).or_default() += count;
    }

    /// Raises a counter to `number`, unless it is larger already.
    pub fn raise(&self, group: &'static str, name: &str, number: u64) {
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

pub struct World {
    pub program: PathBuf,
    /// The kernel and the user's rights allow ublk block devices.
    pub has_ublk: bool,
    pub has_state: bool,
    /// Devices in memory survive a kill of the server, if their settings allow it (`serve --recoverable`).
    pub is_recoverable: bool,
    /// Directory of the current round.
    pub dir: Mutex<PathBuf>,
    disks: Mutex<Vec<Arc<Disk>>>,
    /// Images to which each tag of the image store may refer; locked during a push to the tag.
    pub tags: [Mutex<Vec<PossibleImage>>; TAGS.len()],
    waiting: Mutex<Vec<WaitingMachine>>,
    /// Threads must not start further operations.
    stop: AtomicBool,
    /// The server is being killed or ended, so connections may end.
    server_ending: AtomicBool,
    /// Held for reading by verbs during which the server must not be killed.
    pub no_kill: RwLock<()>,
    missing: Mutex<Vec<Arc<Disk>>>,
    interrupted: Mutex<Vec<InterruptedVerb>>,
    /// Number of requests and verbs that the current server has completed.
    pub completions: Completions,
    first_failure: Mutex<Option<FirstFailure>>,
    /// The most recent verbs with their outcomes, oldest first.
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
            has_state: false,
            is_recoverable: false,
            dir: Mutex::new(PathBuf::new()),
            disks: Mutex::new(Vec::new()),
            tags: Default::default(),
            waiting: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            server_ending: AtomicBool::new(false),
            no_kill: RwLock::new(()),
            missing: Mutex::new(Vec::new()),
            interrupted: Mutex::new(Vec::new()),
            completions: Completions::default(),
            first_failure: Mutex::new(None),
            history: Mutex::new(VecDeque::new()),
            counts: Counts::default(),
            watch: Watch::default(),
            numbers: AtomicU64::new(0),
        }
    }

    /// Creates the state of a run whose servers have a state directory.
    pub fn with_state(program: &Path, is_recoverable: bool) -> Self {
        Self { has_state: true, is_recoverable, has_ublk: false, ..Self::new(program) }
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

    fn lock_disks(&self) -> MutexGuard<'_, Vec<Arc<Disk>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the devices for which `fits` returns true.
    pub fn disks(&self, fits: impl Fn(&Disk) -> bool) -> Vec<Arc<Disk>> {
        self.lock_disks().iter().filter(|disk| fits(disk)).cloned().collect()
    }

    pub fn set_disks(&self, disks: Vec<Arc<Disk>>) {
        *self.lock_disks() = disks;
    }

    pub fn add(&self, disk: Disk) -> Arc<Disk> {
        let disk = Arc::new(disk);
        self.lock_disks().push(Arc::clone(&disk));
        disk
    }

    pub fn forget(&self, disk: &Arc<Disk>) {
        disk.set_removed();
        self.lock_disks().retain(|other| !Arc::ptr_eq(other, disk));
    }

    pub fn add_missing(&self, disk: &Arc<Disk>) {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(disk));
    }

    pub fn missing(&self) -> Vec<Arc<Disk>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn add_interrupted(&self, flight: InterruptedVerb) {
        self.interrupted.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
    }

    pub fn take_interrupted(&self) -> Vec<InterruptedVerb> {
        std::mem::take(&mut *self.interrupted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a virtual machine whose connection ended; it waits to reconnect. If too many wait, the
    /// one that has waited longest is dropped.
    pub fn add_waiting_machine(&self, machine: WaitingMachine) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() == ASLEEP_MAX {
            waiting.remove(0);
        }
        waiting.push(machine);
    }

    /// Removes and returns a machine that waits to reconnect to the device `disk`. `None` if no
    /// such machine waits.
    pub fn take_waiting_machine(&self, disk: &str) -> Option<WaitingMachine> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let at = waiting.iter().position(|machine| machine.disk == disk)?;
        Some(waiting.remove(at))
    }

    pub fn has_waiting_machine(&self, disk: &Disk) -> bool {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.iter().any(|machine| machine.disk == disk.name)
    }

    /// Drops all waiting machines: the next round has other devices.
    pub fn forget_machines(&self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns the id of a new write with this fill pattern, unique in the run.
    pub fn write_id(&self, fill: Fill) -> u64 {
        fill.id(self.next_number())
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub fn set_stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::SeqCst);
    }

    pub fn is_server_ending(&self) -> bool {
        self.server_ending.load(Ordering::SeqCst)
    }

    pub fn set_server_ending(&self, server_ending: bool) {
        self.server_ending.store(server_ending, Ordering::SeqCst);
    }

    /// Records a failure; only the first one is kept.
    pub fn fail(&self, what: impl Into<String>) {
        let mut first_failure = self.first_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if first_failure.is_none() {
            *first_failure = Some(FirstFailure { what: what.into(), running: self.running() });
        }
        drop(first_failure);
        self.set_stop(true);
    }

    /// Describes the current operations of all threads and the most recent verbs, as text.
    pub fn running(&self) -> String {
        let mut running = self.watch.describe_all();
        running += "  the last verbs:\n";
        for verb in self.history.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(running, "    {verb}");
        }
        running
    }

    /// Records a verb with its outcome, for the report of a failure.
    pub fn note(&self, verb: String) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        if history.len() == HISTORY_MAX {
            history.pop_front();
        }
        history.push_back(verb);
    }

    pub fn first_failure(&self) -> Option<FirstFailure> {
        self.first_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
