//! A stack of devices, and the content that each of them may hold.
//!
//! A **node** is a device that receives requests or on which other nodes lie. A node under another
//! is **covered**: it receives no requests of its own, since all writes go through its cover. Each
//! node has an oracle; a cover that does not change content shares the oracle of the node below it.
//!
//! An op runs in three steps, so that the same [`World`] serves runs with one thread or many.
//! [`World::begin_io`] and [`World::scope`] read the world and record the start in the oracles. The
//! task that they return runs without the world. The result is then judged with the world again.

mod cow;
mod crash;
mod failing;
mod files;
mod focus;
mod fork;
mod images;
mod io;
mod make;
mod queries;
mod ram;
mod saves;
mod scope;
mod snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use freestone::cow::{Origin, Snapshot};
use freestone::device::Device;
use freestone::power::Power;
use freestone::qcow2::Format;
use freestone::ram::{Family, Ram};
use freestone::store::format::name::Name;
use tempfile::TempDir;

use crate::disk::{DiskControl, SimDisk};
use crate::oracle::{Clock, Durability, Oracle, ReadToken, SECTOR_BYTES, Violation};
use crate::rt::sync::Arc;
use failing::Injector;
use focus::CurrentFocus;
use images::Images;
use io::Removals;
pub use io::Task;
pub use scope::Scope;

/// Maximum number of nodes; an op that would exceed it does nothing.
const NODES_MAX: usize = 24;
/// Maximum number of families (RAM disks that share a pool).
const FAMILIES_MAX: usize = 3;

/// Number of a node; never reused.
pub type NodeId = u32;
/// Number of a disk or other source of failures. Stays the same when the disk is opened again.
pub type DiskId = u32;
/// Number of an oracle; never reused.
type OracleId = u32;

/// A finding: behaviour that the judge does not accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// A read returned content that was not allowed.
    Content(Violation),
    Message(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Content(violation) => violation.fmt(f),
            Self::Message(what) => f.write_str(what),
        }
    }
}

impl From<Violation> for Finding {
    fn from(violation: Violation) -> Self {
        Self::Content(violation)
    }
}

pub(crate) fn finding<T>(what: impl Into<String>) -> Result<T, Finding> {
    Err(Finding::Message(what.into()))
}

/// The part of an op that runs without the world and may wait for devices.
pub type VerbTask = Box<dyn FnOnce() -> VerbResult + Send>;
/// The part of an op that follows its [`VerbTask`]: judges and records the result in the world.
pub type VerbResult = Box<dyn FnOnce(&mut World) -> Result<(), Finding> + Send>;

#[expect(clippy::unnecessary_wraps, reason = "the callers return an Option")]
fn act(act: impl FnOnce() -> VerbResult + Send + 'static) -> Option<VerbTask> {
    Some(Box::new(act))
}

fn finish(finish: impl FnOnce(&mut World) -> Result<(), Finding> + Send + 'static) -> VerbResult {
    Box::new(finish)
}

#[derive(Default)]
pub struct World {
    nodes: BTreeMap<NodeId, Node>,
    oracles: BTreeMap<OracleId, Oracle>,
    /// Clock shared by all oracles, so that events on different devices have an order.
    clock: Clock,
    families: Vec<FamilyNode>,
    disks: BTreeMap<DiskId, DiskControl>,
    /// Sources of failures other than simulated disks.
    injectors: BTreeMap<DiskId, Injector>,
    /// Number of ids and of write numbers given out.
    ids: u32,
    writes: u64,
    /// Directory of the files of this run; created with the first file.
    dir: Option<TempDir>,
    images: Option<Images>,
    /// Nodes that an op is changing; these receive no requests.
    paused: BTreeSet<NodeId>,
    /// Number of starts and ends of verbs (ops other than requests) that free memory or change
    /// limits.
    freeing_verbs: u64,
    removals: Removals,
    current_focus: Option<CurrentFocus>,
    /// Number of occurrences of each kind of event.
    tally: BTreeMap<&'static str, u64>,
}

/// A device of the stack; see the module documentation.
struct Node {
    name: String,
    kind: Kind,
    device: Arc<dyn Device>,
    oracle: OracleId,
    /// Nodes on which this node lies.
    on: Vec<NodeId>,
    covered: bool,
    /// Disks and other sources of failures that requests to the node may reach.
    disks: BTreeSet<DiskId>,
    /// Families that requests to the node may reach, as indexes.
    families: BTreeSet<usize>,
    /// Number of causes of failures when the node was created or opened again.
    since: Causes,
    /// A cause of failures existed before the crash after which the node was opened again.
    had_failure: bool,
    /// Number of requests in flight on the node.
    users: u32,
}

enum Kind {
    Disk(DiskId),
    Memory,
    /// A file as a device, with the number of its injector.
    File(DiskId),
    Ram(RamNode),
    Origin(OriginNode),
    Cow(CowNode),
    Power(PowerNode),
    /// A read-only file or image, the base of forks.
    Base(BaseSource),
    /// A layer that does not change content, but may fail requests.
    Layer,
}

struct RamNode {
    ram: Ram,
    family: usize,
    /// The content below a fork or its snapshots. `None` if the disk was not forked and started as
    /// zeroes.
    below: Option<Below>,
}

/// The content below a fork and its snapshots, and where it comes from.
#[derive(Clone)]
struct Below {
    shows: Arc<Oracle>,
    /// Device that supplies the content, if it lies outside the family of the fork.
    device: Option<Arc<dyn Device>>,
    /// The file or image at the bottom, if the base is one.
    file: Option<BaseSource>,
}

/// A read-only file or image from which forks are made.
#[derive(Clone)]
enum BaseSource {
    /// A file, which a delta can name as its base.
    File {
        path: PathBuf,
        format: Format,
    },
    Image(StoredImage),
}

/// An image in the image store, as a node or as the base of forks.
#[derive(Clone)]
struct StoredImage {
    name: Name,
    tag: &'static str,
}

struct OriginNode {
    origin: Origin,
    /// A snapshot was removed during its merge, so the content of the origin is half old, half new.
    is_half: bool,
}

struct PowerNode {
    power: Arc<Power>,
    /// Durability of the node below the layer without it.
    durability_below: Durability,
}

#[expect(clippy::struct_excessive_bools, reason = "four independent facts, each with a name")]
struct CowNode {
    snapshot: Snapshot,
    origin: NodeId,
    cow: NodeId,
    /// The COW device has room for copies of all chunks.
    ample: bool,
    /// The snapshot is merging: the origin shows the content of the snapshot.
    merging: bool,
    /// A merge may be recorded on the COW device although the attempt to start it failed.
    maybe_marked: bool,
    /// The snapshot was lost when its disks died. The COW device does not record the loss, and the
    /// origin no longer waits for that record.
    unmarked: bool,
}

struct FamilyNode {
    family: Family,
    /// An empty RAM disk of the family, used to query statistics.
    probe: Ram,
    backing: Option<DiskId>,
    limited: bool,
}

/// Number of causes of failures: errors, and requests that hung.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Causes {
    errors: u64,
    hung: u64,
}

// ---- queries --------------------------------------------------------------------------------

impl World {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn tally(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// Returns all nodes that receive requests: those without a cover.
    pub fn targets(&self) -> Vec<NodeId> {
        self.nodes_that(|node| !node.covered)
    }

    pub fn name(&self, id: NodeId) -> String {
        self.nodes.get(&id).map_or_else(|| format!("node {id} (gone)"), |node| node.name.clone())
    }

    pub fn is_idle(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_none_or(|node| node.users == 0)
    }

    /// Returns descriptions of the contract violations that the disks observed.
    pub fn violations(&self) -> Vec<String> {
        self.disks.iter().flat_map(|(id, disk)| named(*id, disk.violations())).collect()
    }

    fn nodes_that(&self, is: impl Fn(&Node) -> bool) -> Vec<NodeId> {
        self.nodes
            .iter()
            .filter(|(id, node)| !self.paused.contains(id) && is(node))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Returns the number of causes of failures on these disks and other sources.
    fn causes(&self, disks: &BTreeSet<DiskId>) -> Causes {
        let mut causes = Causes::default();
        for fault_counts in disks.iter().filter_map(|id| self.disks.get(id)).map(DiskControl::fault_counts) {
            causes.errors += fault_counts.errors();
            causes.hung += fault_counts.hung;
        }
        for fault_counts in disks.iter().filter_map(|id| self.injectors.get(id)).map(Injector::causes) {
            causes.errors += fault_counts.errors;
            causes.hung += fault_counts.hung;
        }
        causes
    }

    /// Returns true if a failure below the node since its creation may have damaged it permanently.
    fn may_be_damaged(&self, node: &Node) -> bool {
        let below = || node.on.iter().filter_map(|id| self.nodes.get(id));
        node.had_failure
            || self.causes(&node.disks) != node.since
            || below().any(|below| self.may_be_damaged(below))
    }

    /// Returns true if the node uses a family whose memory has or had a limit.
    fn is_limited(&self, node: &Node) -> bool {
        node.families.iter().any(|&family| self.families[family].limited)
    }

    // ---- changes --------------------------------------------------------------------------------

    fn new_id(&mut self) -> u32 {
        self.ids += 1;
        self.ids
    }

    fn new_oracle(&self, name: &str, bytes: u64, durability: Durability) -> Oracle {
        Oracle::with_clock(name, bytes / SECTOR_BYTES as u64, durability, &self.clock)
    }

    fn add_oracle(&mut self, oracle: Oracle) -> OracleId {
        let id = self.new_id();
        self.oracles.insert(id, oracle);
        id
    }

    fn add_disk(&mut self, disk: &SimDisk) -> DiskId {
        let id = self.new_id();
        self.disks.insert(id, disk.control());
        id
    }

    /// Adds a node over the nodes `on`, which it covers. Returns the number of the node.
    fn add(
        &mut self,
        name: &str,
        kind: Kind,
        device: Arc<dyn Device>,
        oracle: OracleId,
        on: Vec<NodeId>,
    ) -> NodeId {
        let (mut disks, mut families) = (BTreeSet::new(), BTreeSet::new());
        match &kind {
            Kind::Disk(disk) => drop(disks.insert(*disk)),
            Kind::Ram(ram) => {
                families.insert(ram.family);
                disks.extend(self.families[ram.family].backing);
            }
            _ => {}
        }
        let is_snapshot = matches!(kind, Kind::Cow(_));
        for (at, id) in on.iter().enumerate() {
            if let Some(below) = self.nodes.get_mut(id) {
                // A snapshot covers its COW device, but not the origin on which it lies.
                below.covered |= !is_snapshot || at > 0;
                disks.extend(&below.disks);
                families.extend(&below.families);
            }
        }
        let since = self.causes(&disks);
        let id = self.new_id();
        let below = on.first().and_then(|below| self.nodes.get(below));
        let name = match below {
            Some(below) => format!("{name} {id} on {}", below.name),
            None => format!("{name} {id}"),
        };
        self.nodes.insert(
            id,
            Node {
                name,
                kind,
                device,
                oracle,
                on,
                covered: false,
                disks,
                families,
                since,
                had_failure: false,
                users: 0,
            },
        );
        id
    }

    /// Ends a verb in its oracle without judging anything.
    fn abandon(&mut self, oracle: OracleId, token: ReadToken) {
        if let Some(oracle) = self.oracles.get_mut(&oracle) {
            oracle.abandon(token);
        }
    }

    /// Drops oracles that no node uses.
    fn sweep(&mut self) {
        let used: BTreeSet<OracleId> = self.nodes.values().map(|node| node.oracle).collect();
        self.oracles.retain(|id, _| used.contains(id));
    }

    fn new_path(&mut self, name: &str) -> Option<PathBuf> {
        let number = self.new_id();
        if self.dir.is_none() {
            self.dir = Some(tempfile::tempdir().expect("a directory for files"));
        }
        self.dir.as_ref().map(|dir| dir.path().join(format!("{name}-{number}")))
    }

    /// Returns the next write number, which is unique among all devices.
    fn next_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }
}

fn named(id: DiskId, violations: Vec<String>) -> impl Iterator<Item = String> {
    violations.into_iter().map(move |violation| format!("disk {id}: {violation}"))
}

/// Picks an element: `number` modulo the length, or the last element for `u16::MAX`. Returns `None`
/// if `all` is empty.
fn pick<T: Copy>(all: &[T], number: u16) -> Option<T> {
    if number == u16::MAX {
        all.last().copied()
    } else {
        all.get(usize::from(number) % all.len().max(1)).copied()
    }
}
