//! What all threads of a run share.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::asleep::Asleep;
pub use super::disk::{Disk, Held, Kind, Known, Mark, May, TAGS};
use super::flight::{Answers, Flight};
use super::watch::Watch;
use crate::oracle::Fill;

/// Verbs that are told with a failure.
const HISTORY_MAX: usize = 60;
/// Machines that wait for their disk at most.
const ASLEEP_MAX: usize = 8;

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
    /// The servers keep a state.
    pub has_state: bool,
    /// The directory of this round.
    pub dir: Mutex<PathBuf>,
    disks: Mutex<Vec<Arc<Disk>>>,
    /// What the tags of the store may say; locked by who pushes there.
    pub tags: [Mutex<Vec<May>>; TAGS.len()],
    /// Machines that wait for their disk.
    asleep: Mutex<Vec<Asleep>>,
    /// Threads begin nothing any more.
    stop: AtomicBool,
    /// The server is being killed or ended: connections end for no other reason.
    dying: AtomicBool,
    /// Held for reading by a verb in the middle of which nobody may kill the server.
    pub steady: RwLock<()>,
    /// Those that a server could not make again.
    missing: Mutex<Vec<Arc<Disk>>>,
    /// Verbs that had no answer when the server was killed.
    flights: Mutex<Vec<Flight>>,
    /// Of requests and verbs.
    pub answers: Answers,
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
            has_state: false,
            dir: Mutex::new(PathBuf::new()),
            disks: Mutex::new(Vec::new()),
            tags: Default::default(),
            asleep: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            dying: AtomicBool::new(false),
            steady: RwLock::new(()),
            missing: Mutex::new(Vec::new()),
            flights: Mutex::new(Vec::new()),
            answers: Answers::default(),
            trouble: Mutex::new(None),
            history: Mutex::new(VecDeque::new()),
            counts: Counts::default(),
            watch: Watch::default(),
            numbers: AtomicU64::new(0),
        }
    }

    /// The same with servers that keep a state.
    pub fn with_state(program: &Path) -> Self {
        Self { has_state: true, has_ublk: false, ..Self::new(program) }
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

    /// A server could not make this one again.
    pub fn miss(&self, disk: &Arc<Disk>) {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(disk));
    }

    pub fn missing(&self) -> Vec<Arc<Disk>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A verb had no answer when the server was killed.
    pub fn in_flight(&self, flight: Flight) {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
    }

    pub fn take_flights(&self) -> Vec<Flight> {
        std::mem::take(&mut *self.flights.lock().unwrap_or_else(PoisonError::into_inner))
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
            *trouble = Some(Trouble { what: what.into(), running: self.running() });
        }
        drop(trouble);
        self.set_stop(true);
    }

    /// What all threads do, and the last verbs.
    pub fn running(&self) -> String {
        let mut running = self.watch.all();
        running += "  the last verbs:\n";
        for verb in self.history.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(running, "    {verb}");
        }
        running
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
