//! Sources of failures besides simulated disks: the library's fault rules and bad blocks, truncated
//! files, and the image store.
//!
//! Each source has a disk number, under which its failures are counted as causes of errors.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Weak;

use freestone::device::{
    Buffer, Completion, Device, Error, Extent, IoBuf, Request, Result as Answer, TryResult, forward_device,
};
use freestone::faults::{Faults, Rules};
use freestone::null::{BadBlocks, BadBlocksConfig, BadBlocksError};
use freestone_testkit::objects::MemoryStore;

use super::images::StoreFaults;
use super::{Causes, DiskId, Kind, NodeId, VerbTask, World, act, finding, finish, pick};
use crate::disk::DiskControl;
use crate::oracle::{self, Outcome, SECTOR_BYTES};
use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SECTOR: u64 = SECTOR_BYTES as u64;

/// A source of failures other than a simulated disk.
pub(super) struct Injector {
    what: Source,
    /// Failures counted before the rules were last replaced.
    past: Causes,
    /// Last known number of failures. Used after the layer that counts them was dropped.
    last_known: Cell<Causes>,
}

enum Source {
    Faults(Weak<Faults>),
    Bad(Weak<BadBlocks>, Arc<Count>),
    Cut(Arc<Truncation>, Arc<Count>),
    Store(Arc<MemoryStore>, Arc<StoreFaults>),
    /// The value is non-zero if the data of an opened image may have been pruned.
    LostImage(Arc<AtomicU32>),
}

impl Injector {
    fn new(what: Source) -> Self {
        Self { what, past: Causes::default(), last_known: Cell::default() }
    }

    pub fn causes(&self) -> Causes {
        let now = match &self.what {
            Source::Faults(faults) => faults.upgrade().map(|faults| fired(&faults)),
            Source::Bad(_, count) | Source::Cut(_, count) => {
                Some(Causes { errors: count.failed.load(Ordering::SeqCst), hung: 0 })
            }
            Source::Store(_, faults) => Some(faults.causes()),
            // The loss is permanent, so each query must report one more cause than the last.
            Source::LostImage(lost) => {
                let more = u64::from(lost.load(Ordering::SeqCst) > 0);
                Some(Causes { errors: self.last_known.get().errors + more, hung: 0 })
            }
        };
        if let Some(now) = now {
            let past = self.past;
            self.last_known.set(Causes { errors: past.errors + now.errors, hung: past.hung + now.hung });
        }
        self.last_known.get()
    }

    fn set(&mut self, rules: Rules) {
        if let Source::Faults(faults) = &self.what
            && let Some(faults) = faults.upgrade()
        {
            self.past = self.causes();
            // A failure decided during the replacement is counted under neither rule set, so count
            // one in advance.
            self.past.errors += u64::from(faults.rules() != Rules::default());
            faults.set(rules, None);
        }
    }

    pub fn release(&self) {
        if let Source::Faults(faults) = &self.what
            && let Some(faults) = faults.upgrade()
        {
            faults.release();
        }
    }

    pub fn heal(&mut self) {
        self.set(Rules::default());
        self.release();
        match &self.what {
            Source::Faults(_) | Source::LostImage(_) => {}
            Source::Store(memory, _) => memory.heal(),
            Source::Bad(bad, count) => {
                let bad = bad.upgrade();
                let ranges = bad.iter().flat_map(|bad| bad.ranges());
                for (first, last) in ranges {
                    count.changes.fetch_add(1, Ordering::SeqCst);
                    // If the range has become good in the meantime, nothing is left to do.
                    let _ = bad.as_ref().map(|bad| bad.change(&format!("-{first}-{last}")));
                }
            }
            Source::Cut(cut, count) => {
                if cut.at.load(Ordering::SeqCst) < cut.size {
                    cut.set(cut.size, count);
                }
            }
        }
    }
}

/// Counts how often rules that fail or hang a request have fired.
fn fired(faults: &Faults) -> Causes {
    let mut causes = Causes::default();
    for count in faults.counts() {
        causes.errors += if count.rule.contains("error=") { count.fired } else { 0 };
        causes.hung += if count.rule.contains("hang") { count.fired } else { 0 };
    }
    causes
}

/// A file that may be shorter than the device opened on it.
struct Truncation {
    path: PathBuf,
    size: u64,
    /// Current size of the file in bytes.
    at: AtomicU64,
}

impl Truncation {
    fn set(&self, size: u64, count: &Count) {
        count.changes.fetch_add(1, Ordering::SeqCst);
        self.at.fetch_min(size, Ordering::SeqCst);
        let file = std::fs::OpenOptions::new().write(true).open(&self.path);
        file.and_then(|file| file.set_len(size)).expect("a file of ours can be set in length");
        self.at.store(size, Ordering::SeqCst);
        count.changes.fetch_add(1, Ordering::SeqCst);
    }
}

/// Number of failures that have a cause, and of changes of the conditions.
#[derive(Default)]
struct Count {
    failed: AtomicU64,
    /// Number of changes of the conditions under which requests fail.
    changes: AtomicU64,
}

/// A layer that counts the errors of a device that have an injected cause.
struct CountingLayer {
    inner: Arc<dyn Device>,
    count: Arc<Count>,
    /// Returns true if a request (offset and length in bytes) has a cause to fail under the current
    /// conditions.
    has_cause: Box<dyn Fn(u64, u64) -> bool + Send + Sync>,
}

/// The conditions when a request started.
#[derive(Clone, Copy)]
struct Conditions {
    has_cause: bool,
    changes: u64,
}

impl Count {
    /// Counts a media error if it has a cause. If the conditions changed while the request ran, the
    /// change may be the cause.
    fn judge(&self, conditions: Conditions, error: Error) {
        let is_caused = conditions.has_cause || self.changes.load(Ordering::SeqCst) != conditions.changes;
        self.failed.fetch_add(u64::from(is_caused && error == Error::Media), Ordering::SeqCst);
    }
}

impl CountingLayer {
    fn begin(&self, offset: u64, len: u64) -> Conditions {
        let changes = self.count.changes.load(Ordering::SeqCst);
        Conditions { has_cause: (self.has_cause)(offset, len), changes }
    }
}

impl Device for CountingLayer {
    forward_device!(|layer| layer.inner => geometry; prefetch: below, zoned: none, changes: below);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Answer<TryResult> {
        let conditions = self.begin(request.offset, request.len);
        self.inner.try_io(request, buffer).inspect_err(|&error| self.count.judge(conditions, error))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (conditions, count) = (self.begin(request.offset, request.len), Arc::clone(&self.count));
        let done = Completion::new(move |answer: Answer<()>, buffer| {
            done.complete(answer.inspect_err(|&error| count.judge(conditions, error)), buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Answer<u64> {
        let conditions = self.begin(offset, len);
        self.inner.extents(offset, len, row).inspect_err(|&error| self.count.judge(conditions, error))
    }
}

impl World {
    fn add_injector(&mut self, what: Source) -> DiskId {
        let id = self.new_id();
        self.injectors.insert(id, Injector::new(what));
        id
    }

    pub(super) fn add_store(&mut self, memory: &Arc<MemoryStore>, faults: &Arc<StoreFaults>) -> DiskId {
        self.add_injector(Source::Store(Arc::clone(memory), Arc::clone(faults)))
    }

    pub(super) fn add_lost_image(&mut self, lost: Arc<AtomicU32>) -> DiskId {
        self.add_injector(Source::LostImage(lost))
    }

    /// Adds the injector to the disks whose failures count as causes for the node.
    pub(super) fn add_cause(&mut self, node: NodeId, injector: Option<DiskId>) {
        if let Some(node) = self.nodes.get_mut(&node) {
            node.disks.extend(injector);
        }
    }

    /// Puts a fault layer without rules over a device.
    pub(super) fn with_faults(
        &mut self,
        device: Arc<dyn Device>,
        seed: u64,
    ) -> std::io::Result<(DiskId, Arc<dyn Device>)> {
        let faults = Arc::new(Faults::new(device, Rules::default(), seed)?);
        Ok((self.add_injector(Source::Faults(Arc::downgrade(&faults))), faults))
    }

    /// Puts a layer over a file that counts the errors caused by truncating the file.
    pub(super) fn with_cuts(&mut self, file: Arc<dyn Device>, path: PathBuf) -> (DiskId, Arc<dyn Device>) {
        let size = file.geometry().size;
        let cut = Arc::new(Truncation { path, size, at: AtomicU64::new(size) });
        let count = Arc::<Count>::default();
        let id = self.add_injector(Source::Cut(Arc::clone(&cut), Arc::clone(&count)));
        let has_cause =
            Box::new(move |offset: u64, len: u64| offset.saturating_add(len) > cut.at.load(Ordering::SeqCst));
        (id, Arc::new(CountingLayer { inner: file, count, has_cause }))
    }

    pub(super) fn make_faults(&mut self, below: NodeId, seed: u64) -> Option<VerbTask> {
        let (device, oracle) = (Arc::clone(&self.nodes[&below].device), self.nodes[&below].oracle);
        match self.with_faults(device, seed) {
            Ok((injector, device)) => {
                let node = self.add("faults", Kind::Layer, device, oracle, vec![below]);
                self.add_cause(node, Some(injector));
                None
            }
            Err(error) => {
                act(move || finish(move |_| finding(format!("a fault layer could not be created: {error}"))))
            }
        }
    }

    /// Puts a layer with bad blocks over a device, as a node. `how` selects the options of the
    /// layer.
    pub(super) fn make_bad_blocks(&mut self, below: NodeId, how: u8) -> Option<VerbTask> {
        let (device, oracle) = (Arc::clone(&self.nodes[&below].device), self.nodes[&below].oracle);
        let config = BadBlocksConfig { once: how.is_multiple_of(2), partial_io: how % 4 < 2 };
        let (bad, count) = (Arc::new(BadBlocks::new(device, config)), Arc::<Count>::default());
        let injector = self.add_injector(Source::Bad(Arc::downgrade(&bad), Arc::clone(&count)));
        let inner: Arc<dyn Device> = Arc::clone(&bad) as _;
        let has_cause = Box::new(move |offset, len| bad.bytes_before_bad(offset, len).is_some());
        let device = Arc::new(CountingLayer { inner, count, has_cause });
        let node = self.add("bad blocks", Kind::Layer, device, oracle, vec![below]);
        self.add_cause(node, Some(injector));
        None
    }

    pub(super) fn rules(&mut self, layer: u16, text: &str) -> Option<VerbTask> {
        let rules = match text.parse::<Rules>() {
            Ok(rules) => rules,
            Err(error) => {
                let error = error.to_string();
                return act(move || finish(move |_| finding(error)));
            }
        };
        let is = |what: &Source| matches!(what, Source::Faults(faults) if faults.strong_count() > 0);
        let id = self.injector(layer, is)?;
        self.injectors.get_mut(&id)?.set(rules);
        self.count("rules");
        None
    }

    /// Makes blocks of the layer with this number bad, or good if `good` is set.
    pub(super) fn bad_blocks(&mut self, layer: u16, at: u32, sectors: u16, good: bool) -> Option<VerbTask> {
        let is = |what: &Source| matches!(what, Source::Bad(bad, _) if bad.strong_count() > 0);
        let id = self.injector(layer, is)?;
        let Source::Bad(bad, count) = &self.injectors.get(&id)?.what else { return None };
        let bad = bad.upgrade()?;
        let size = bad.geometry().size / SECTOR;
        let first = u64::from(at) % size;
        let last = (first + u64::from(sectors)).min(size - 1);
        count.changes.fetch_add(1, Ordering::SeqCst);
        let changed = bad.change(&format!("{}{first}-{last}", if good { '-' } else { '+' }));
        self.count("bad blocks");
        match changed {
            Ok(()) | Err(BadBlocksError::TooMany) => None,
            Err(error) => act(move || finish(move |_| finding(format!("no bad blocks: {error}")))),
        }
    }

    /// Returns the file devices that can be truncated: they have no cover, so no other node shows
    /// their content.
    fn cuttable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(node.kind, Kind::File(_)) && !node.covered)
    }

    /// Truncates the file of a device. Requests to the lost range fail until the file is healed;
    /// from then on the range reads as zeroes.
    pub(super) fn cut(&mut self, file: u16, parts: u16) -> Option<VerbTask> {
        let id = pick(&self.cuttable(), file)?;
        let node = &self.nodes[&id];
        let Kind::File(injector) = node.kind else { return None };
        let (cut, count) = match &self.injectors.get(&injector)?.what {
            Source::Cut(cut, count) => (Arc::clone(cut), Arc::clone(count)),
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

    fn injector(&self, number: u16, is: impl Fn(&Source) -> bool) -> Option<DiskId> {
        let all = self.injectors.iter().filter(|(_, injector)| is(&injector.what));
        pick(&all.map(|(id, _)| *id).collect::<Vec<_>>(), number)
    }

    /// Releases the hanging requests of all disks and injectors.
    pub fn release(&self) {
        self.disks.values().for_each(DiskControl::release);
        self.injectors.values().for_each(Injector::release);
    }

    pub(super) fn heal_one(&mut self, number: u16) {
        let all: Vec<DiskId> = self.disks.keys().chain(self.injectors.keys()).copied().collect();
        let Some(id) = pick(&all, number) else { return };
        self.disks.get(&id).into_iter().for_each(DiskControl::heal);
        self.injectors.get_mut(&id).into_iter().for_each(Injector::heal);
    }

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
    fn only_failures_of_bad_blocks_are_counted() {
        let below = Arc::new(Model::new(1 << 16, 512));
        let bad = Arc::new(BadBlocks::new(below, BadBlocksConfig { once: false, partial_io: false }));
        bad.change("+8-15").unwrap();
        let count = Arc::<Count>::default();
        let inner: Arc<dyn Device> = Arc::clone(&bad) as _;
        let has_cause = Box::new(move |offset, len| bad.bytes_before_bad(offset, len).is_some());
        let device = CountingLayer { inner, count: Arc::clone(&count), has_cause };
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        assert_eq!(count.failed.load(Ordering::SeqCst), 0);
        assert_eq!(device.write_at(4096, &[1; 512], Flags::empty()), Err(Error::Media));
        assert_eq!(count.failed.load(Ordering::SeqCst), 1);
        count.judge(device.begin(0, 512), Error::Media);
        assert_eq!(count.failed.load(Ordering::SeqCst), 1, "it has no cause there");
    }

    #[test]
    fn fault_counts_survive_new_rules_and_removal() {
        let faults = Arc::new(
            Faults::new(Arc::new(Model::new(1 << 16, 512)), "read error=EIO".parse().unwrap(), 1).unwrap(),
        );
        let mut injector = Injector::new(Source::Faults(Arc::downgrade(&faults)));
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
