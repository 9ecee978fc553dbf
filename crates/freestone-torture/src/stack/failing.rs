//! What fails on purpose beside simulated disks: the library's faults, its bad blocks, and files
//! that are cut off below.
//!
//! Each has a number as a disk has, under which what it did is counted as a cause.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Weak;

use freestone::device::{
    Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Request, Result as Answer, Tried,
};
use freestone::faults::{Faults, Rules};
use freestone::null::{BadBlocks, BadConfig, BadError};
use freestone_testkit::objects::Memory;

use super::images::StoreFaults;
use super::{Act, Causes, DiskId, Kind, NodeId, World, act, finish, pick, wrong};
use crate::disk::DiskControl;
use crate::oracle::{self, Outcome, SECTOR_BYTES};
use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SECTOR: u64 = SECTOR_BYTES as u64;

/// Something that makes requests fail.
pub(super) struct Injector {
    what: What,
    /// What it did under rules that it has no more.
    past: Causes,
    /// What it had done when it was last looked at: it may be gone.
    seen: Cell<Causes>,
}

enum What {
    Faults(Weak<Faults>),
    Bad(Weak<BadBlocks>, Arc<Count>),
    Cut(Arc<Cut>, Arc<Count>),
    Store(Arc<Memory>, Arc<StoreFaults>),
    /// Not zero where what is read may be gone for good.
    Fate(Arc<AtomicU32>),
}

impl Injector {
    fn new(what: What) -> Self {
        Self { what, past: Causes::default(), seen: Cell::default() }
    }

    pub fn causes(&self) -> Causes {
        let now = match &self.what {
            What::Faults(faults) => faults.upgrade().map(|faults| fired(&faults)),
            What::Bad(_, count) | What::Cut(_, count) => {
                Some(Causes { errors: count.failed.load(Ordering::SeqCst), hung: 0 })
            }
            What::Store(_, faults) => Some(faults.causes()),
            // Each look finds another cause.
            What::Fate(lost) => {
                let more = u64::from(lost.load(Ordering::SeqCst) > 0);
                Some(Causes { errors: self.seen.get().errors + more, hung: 0 })
            }
        };
        if let Some(now) = now {
            let past = self.past;
            self.seen.set(Causes { errors: past.errors + now.errors, hung: past.hung + now.hung });
        }
        self.seen.get()
    }

    fn set(&mut self, rules: Rules) {
        if let What::Faults(faults) = &self.what
            && let Some(faults) = faults.upgrade()
        {
            self.past = self.causes();
            // What is decided while they are replaced is counted nowhere.
            self.past.errors += u64::from(faults.rules() != Rules::default());
            faults.set(rules, None);
        }
    }

    pub fn release(&self) {
        if let What::Faults(faults) = &self.what
            && let Some(faults) = faults.upgrade()
        {
            faults.release();
        }
    }

    pub fn heal(&mut self) {
        self.set(Rules::default());
        self.release();
        match &self.what {
            What::Faults(_) | What::Fate(_) => {}
            What::Store(memory, _) => memory.heal(),
            What::Bad(bad, count) => {
                let bad = bad.upgrade();
                let ranges = bad.iter().flat_map(|bad| bad.ranges());
                for (first, last) in ranges {
                    count.changes.fetch_add(1, Ordering::SeqCst);
                    // It was there; if it is good by now, so much the better.
                    let _ = bad.as_ref().map(|bad| bad.change(&format!("-{first}-{last}")));
                }
            }
            What::Cut(cut, count) => {
                if cut.at.load(Ordering::SeqCst) < cut.size {
                    cut.set(cut.size, count);
                }
            }
        }
    }
}

/// How often rules fired that give an error, or have something hang.
fn fired(faults: &Faults) -> Causes {
    let mut causes = Causes::default();
    for count in faults.counts() {
        causes.errors += if count.rule.contains("error=") { count.fired } else { 0 };
        causes.hung += if count.rule.contains("hang") { count.fired } else { 0 };
    }
    causes
}

/// A file that may end before its device does.
struct Cut {
    path: PathBuf,
    size: u64,
    /// Where it ends.
    at: AtomicU64,
}

impl Cut {
    fn set(&self, size: u64, count: &Count) {
        count.changes.fetch_add(1, Ordering::SeqCst);
        self.at.fetch_min(size, Ordering::SeqCst);
        let file = std::fs::OpenOptions::new().write(true).open(&self.path);
        file.and_then(|file| file.set_len(size)).expect("a file of ours can be set in length");
        self.at.store(size, Ordering::SeqCst);
        count.changes.fetch_add(1, Ordering::SeqCst);
    }
}

/// Errors that had a cause.
#[derive(Default)]
struct Count {
    failed: AtomicU64,
    /// Changes of what has a cause.
    changes: AtomicU64,
}

/// Counts the errors of a device that it was made to answer.
struct Counting {
    inner: Arc<dyn Device>,
    count: Arc<Count>,
    /// Whether a request has a cause to fail, as things are.
    has_cause: Box<dyn Fn(u64, u64) -> bool + Send + Sync>,
}

/// What was so when a request began.
#[derive(Clone, Copy)]
struct Began {
    has_cause: bool,
    changes: u64,
}

impl Count {
    /// Where things changed meanwhile, an error may come from that.
    fn judge(&self, began: Began, error: Error) {
        let is_caused = began.has_cause || self.changes.load(Ordering::SeqCst) != began.changes;
        self.failed.fetch_add(u64::from(is_caused && error == Error::Media), Ordering::SeqCst);
    }
}

impl Counting {
    fn begin(&self, offset: u64, len: u64) -> Began {
        let changes = self.count.changes.load(Ordering::SeqCst);
        Began { has_cause: (self.has_cause)(offset, len), changes }
    }
}

impl Device for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Answer<Tried> {
        let began = self.begin(request.offset, request.len);
        self.inner.try_io(request, buffer).inspect_err(|&error| self.count.judge(began, error))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (began, count) = (self.begin(request.offset, request.len), Arc::clone(&self.count));
        let done = Completion::new(move |answer: Answer<()>, buffer| {
            done.complete(answer.inspect_err(|&error| count.judge(began, error)), buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Answer<u64> {
        let began = self.begin(offset, len);
        self.inner.extents(offset, len, row).inspect_err(|&error| self.count.judge(began, error))
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes()
    }
}

impl World {
    fn add_injector(&mut self, what: What) -> DiskId {
        let id = self.new_id();
        self.injectors.insert(id, Injector::new(what));
        id
    }

    pub(super) fn add_store(&mut self, memory: &Arc<Memory>, faults: &Arc<StoreFaults>) -> DiskId {
        self.add_injector(What::Store(Arc::clone(memory), Arc::clone(faults)))
    }

    pub(super) fn add_fate(&mut self, lost: Arc<AtomicU32>) -> DiskId {
        self.add_injector(What::Fate(lost))
    }

    /// What fails on the way to a node is a cause.
    pub(super) fn fails_by(&mut self, node: NodeId, injector: Option<DiskId>) {
        if let Some(node) = self.nodes.get_mut(&node) {
            node.disks.extend(injector);
        }
    }

    /// Puts faults over a device; without rules so far.
    pub(super) fn with_faults(
        &mut self,
        device: Arc<dyn Device>,
        seed: u64,
    ) -> std::io::Result<(DiskId, Arc<dyn Device>)> {
        let faults = Arc::new(Faults::new(device, Rules::default(), seed)?);
        Ok((self.add_injector(What::Faults(Arc::downgrade(&faults))), faults))
    }

    /// Counts what a file that is cut off fails.
    pub(super) fn with_cuts(&mut self, file: Arc<dyn Device>, path: PathBuf) -> (DiskId, Arc<dyn Device>) {
        let size = file.geometry().size;
        let cut = Arc::new(Cut { path, size, at: AtomicU64::new(size) });
        let count = Arc::<Count>::default();
        let id = self.add_injector(What::Cut(Arc::clone(&cut), Arc::clone(&count)));
        let has_cause =
            Box::new(move |offset: u64, len: u64| offset.saturating_add(len) > cut.at.load(Ordering::SeqCst));
        (id, Arc::new(Counting { inner: file, count, has_cause }))
    }

    /// Puts a layer that fails by rule over a device.
    pub(super) fn make_faults(&mut self, below: NodeId, seed: u64) -> Option<Act> {
        let (device, oracle) = (Arc::clone(&self.nodes[&below].device), self.nodes[&below].oracle);
        match self.with_faults(device, seed) {
            Ok((injector, device)) => {
                let node = self.add("faults", Kind::Layer, device, oracle, vec![below]);
                self.fails_by(node, Some(injector));
                None
            }
            Err(error) => {
                act(move || finish(move |_| wrong(format!("no faults could be put there: {error}"))))
            }
        }
    }

    /// Puts a layer with bad blocks over a device.
    pub(super) fn make_bad_blocks(&mut self, below: NodeId, how: u8) -> Option<Act> {
        let (device, oracle) = (Arc::clone(&self.nodes[&below].device), self.nodes[&below].oracle);
        let config = BadConfig { once: how.is_multiple_of(2), partial_io: how % 4 < 2 };
        let (bad, count) = (Arc::new(BadBlocks::new(device, config)), Arc::<Count>::default());
        let injector = self.add_injector(What::Bad(Arc::downgrade(&bad), Arc::clone(&count)));
        let inner: Arc<dyn Device> = Arc::clone(&bad) as _;
        let has_cause = Box::new(move |offset, len| bad.verdict(offset, len).is_some());
        let device = Arc::new(Counting { inner, count, has_cause });
        let node = self.add("bad blocks", Kind::Layer, device, oracle, vec![below]);
        self.fails_by(node, Some(injector));
        None
    }

    /// Other rules for one of the faults.
    pub(super) fn rules(&mut self, layer: u16, text: &str) -> Option<Act> {
        let rules = match text.parse::<Rules>() {
            Ok(rules) => rules,
            Err(error) => {
                let error = error.to_string();
                return act(move || finish(move |_| wrong(error)));
            }
        };
        let is = |what: &What| matches!(what, What::Faults(faults) if faults.strong_count() > 0);
        let id = self.injector(layer, is)?;
        self.injectors.get_mut(&id)?.set(rules);
        self.count("rules");
        None
    }

    /// Blocks of a layer become bad, or good.
    pub(super) fn bad_blocks(&mut self, layer: u16, at: u32, sectors: u16, good: bool) -> Option<Act> {
        let is = |what: &What| matches!(what, What::Bad(bad, _) if bad.strong_count() > 0);
        let id = self.injector(layer, is)?;
        let What::Bad(bad, count) = &self.injectors.get(&id)?.what else { return None };
        let bad = bad.upgrade()?;
        let size = bad.geometry().size / SECTOR;
        let first = u64::from(at) % size;
        let last = (first + u64::from(sectors)).min(size - 1);
        count.changes.fetch_add(1, Ordering::SeqCst);
        let changed = bad.change(&format!("{}{first}-{last}", if good { '-' } else { '+' }));
        self.count("bad blocks");
        match changed {
            Ok(()) | Err(BadError::TooMany) => None,
            Err(error) => act(move || finish(move |_| wrong(format!("no bad blocks: {error}")))),
        }
    }

    /// Files that can be cut off: those of which nothing else shows what they hold.
    fn cuttable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(node.kind, Kind::File(_)) && !node.covered)
    }

    /// A file loses its end: it has fewer bytes until it is healed, and zeroes there from then on.
    pub(super) fn cut(&mut self, file: u16, parts: u16) -> Option<Act> {
        let id = pick(&self.cuttable(), file)?;
        let node = &self.nodes[&id];
        let Kind::File(injector) = node.kind else { return None };
        let (cut, count) = match &self.injectors.get(&injector)?.what {
            What::Cut(cut, count) => (Arc::clone(cut), Arc::clone(count)),
            _ => return None,
        };
        let sectors = cut.size / SECTOR;
        let first = sectors * u64::from(parts) / 1024;
        if first * SECTOR >= cut.at.load(Ordering::SeqCst) {
            return None;
        }
        let oracle = node.oracle;
        let serial = self.next_write();
        let lost = self.oracles.get_mut(&oracle)?.begin_write(serial, first..sectors, oracle::Kind::Zeroes);
        cut.set(first * SECTOR, &count);
        self.oracles.get_mut(&oracle)?.end(lost, Outcome::Done { fua: true });
        self.count("files that were cut off");
        None
    }

    fn injector(&self, number: u16, is: impl Fn(&What) -> bool) -> Option<DiskId> {
        let all = self.injectors.iter().filter(|(_, injector)| is(&injector.what));
        pick(&all.map(|(id, _)| *id).collect::<Vec<_>>(), number)
    }

    /// What hangs below goes on.
    pub fn release(&self) {
        self.disks.values().for_each(DiskControl::release);
        self.injectors.values().for_each(Injector::release);
    }

    /// All is well with one thing that fails.
    pub(super) fn heal_one(&mut self, number: u16) {
        let all: Vec<DiskId> = self.disks.keys().chain(self.injectors.keys()).copied().collect();
        let Some(id) = pick(&all, number) else { return };
        self.disks.get(&id).into_iter().for_each(DiskControl::heal);
        self.injectors.get_mut(&id).into_iter().for_each(Injector::heal);
    }

    /// All is well below.
    pub fn heal(&mut self) {
        self.disks.values().for_each(DiskControl::heal);
        self.injectors.values_mut().for_each(Injector::heal);
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::{Blocking as _, Flags};
    use freestone_testkit::Model;

    use super::*;

    #[test]
    fn only_what_bad_blocks_fail_is_counted() {
        let below = Arc::new(Model::new(1 << 16, 512));
        let bad = Arc::new(BadBlocks::new(below, BadConfig { once: false, partial_io: false }));
        bad.change("+8-15").unwrap();
        let count = Arc::<Count>::default();
        let inner: Arc<dyn Device> = Arc::clone(&bad) as _;
        let has_cause = Box::new(move |offset, len| bad.verdict(offset, len).is_some());
        let device = Counting { inner, count: Arc::clone(&count), has_cause };
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        assert_eq!(count.failed.load(Ordering::SeqCst), 0);
        assert_eq!(device.write_at(4096, &[1; 512], Flags::empty()), Err(Error::Media));
        assert_eq!(count.failed.load(Ordering::SeqCst), 1);
        count.judge(device.begin(0, 512), Error::Media);
        assert_eq!(count.failed.load(Ordering::SeqCst), 1, "it has no cause there");
    }

    #[test]
    fn what_faults_did_is_known_when_they_have_other_rules_and_when_they_are_gone() {
        let faults = Arc::new(
            Faults::new(Arc::new(Model::new(1 << 16, 512)), "read error=EIO".parse().unwrap(), 1).unwrap(),
        );
        let mut injector = Injector::new(What::Faults(Arc::downgrade(&faults)));
        assert_eq!(faults.read_at(0, &mut [0; 512]), Err(Error::Media));
        assert_eq!(injector.causes(), Causes { errors: 1, hung: 0 });
        injector.set("write delay=1us".parse().unwrap());
        let since = injector.causes();
        assert!(since.errors >= 1);
        faults.write_at(0, &[1; 512], Flags::empty()).unwrap();
        assert_eq!(injector.causes(), since, "a delay is no error");
        drop(faults);
        assert_eq!(injector.causes(), since);
    }
}
