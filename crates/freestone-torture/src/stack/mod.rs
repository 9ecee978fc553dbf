//! A stack of devices, and the content that each of them may hold.
//!
//! A **node** is a device that receives requests or that other nodes lie on. A node under another
//! is **covered**: it receives no requests of its own, since all writes go through its cover. Each
//! node has an oracle; a cover that does not change content shares the oracle of the node below.
//!
//! An op runs in three steps, so that one [`World`] serves one thread or many: [`World::begin_io`]
//! and [`World::begin`] read the world and inform the oracles; the task that they return runs
//! without the world; the result is then judged with the world again.

mod begin;
mod cow;
mod crash;
mod failing;
mod files;
mod focus;
mod fork;
mod images;
mod io;
mod look;
mod make;
mod moment;
mod ram;
mod saves;

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
pub use begin::Scope;
use failing::Injector;
use focus::CurrentFocus;
use images::Images;
use io::Removals;
pub use io::Task;

/// Maximum number of nodes; an op that would add more does nothing.
const NODES_MAX: usize = 24;
/// Maximum number of families.
const FAMILIES_MAX: usize = 3;

/// Number of a node; never reused.
pub type NodeId = u32;
/// Number of a disk; stays the same when the disk is opened again.
pub type DiskId = u32;
/// Number of an oracle.
type OracleId = u32;

/// A finding: behaviour that the judge does not accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// A read returned content that was not allowed.
    Content(Violation),
    /// Any other finding, as a message.
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

/// Returns a finding with this message.
pub(crate) fn finding<T>(what: impl Into<String>) -> Result<T, Finding> {
    Err(Finding::Message(what.into()))
}

/// Work without the world, which may wait for devices.
pub type VerbTask = Box<dyn FnOnce() -> VerbResult + Send>;
/// Work with the world after that.
pub type VerbResult = Box<dyn FnOnce(&mut World) -> Result<(), Finding> + Send>;

#[expect(clippy::unnecessary_wraps, reason = "the callers return an Option")]
fn act(act: impl FnOnce() -> VerbResult + Send + 'static) -> Option<VerbTask> {
    Some(Box::new(act))
}

fn finish(finish: impl FnOnce(&mut World) -> Result<(), Finding> + Send + 'static) -> VerbResult {
    Box::new(finish)
}

/// The devices of one run and everything they stand on.
#[derive(Default)]
pub struct World {
    nodes: BTreeMap<NodeId, Node>,
    oracles: BTreeMap<OracleId, Oracle>,
    /// Shared by all oracles, so that events on several devices have an order.
    clock: Clock,
    families: Vec<FamilyNode>,
    disks: BTreeMap<DiskId, DiskControl>,
    /// Sources of failures other than disks.
    injectors: BTreeMap<DiskId, Injector>,
    /// Numbers given out so far.
    ids: u32,
    writes: u64,
    /// Directory of files, once there are any.
    dir: Option<TempDir>,
    images: Option<Images>,
    /// Nodes being changed; these receive no requests.
    paused: BTreeSet<NodeId>,
    /// Number of starts and ends of verbs that free memory or change limits.
    freeing_verbs: u64,
    removals: Removals,
    current_focus: Option<CurrentFocus>,
    /// Number of occurrences of each kind of event, for the report.
    tally: BTreeMap<&'static str, u64>,
}

/// A device of the stack, see the module.
struct Node {
    name: String,
    kind: Kind,
    device: Arc<dyn Device>,
    oracle: OracleId,
    /// Nodes that this node lies on.
    on: Vec<NodeId>,
    covered: bool,
    /// Disks that its requests may reach, and other sources of failures on the way.
    disks: BTreeSet<DiskId>,
    /// Families that its requests may reach.
    families: BTreeSet<usize>,
    /// Causes of failures when the node was created.
    since: Causes,
    /// A cause of failures existed before `since`, before a crash.
    had_failure: bool,
    /// Requests in flight.
    users: u32,
}

enum Kind {
    Disk(DiskId),
    Memory,
    /// The number under which its failures are counted.
    File(DiskId),
    Ram(RamNode),
    Origin(OriginNode),
    Cow(CowNode),
    Power(PowerNode),
    /// A read-only file or image.
    Base(BaseSource),
    /// A layer that does not change content, but may fail.
    Layer,
}

struct RamNode {
    ram: Ram,
    family: usize,
    /// The base of a fork, or of the origin of a snapshot; `None` reads as zeroes.
    below: Option<Below>,
}

/// The base below a fork and its snapshots.
#[derive(Clone)]
struct Below {
    shows: Arc<Oracle>,
    /// Device at the bottom, if it does not belong to the family.
    device: Option<Arc<dyn Device>>,
    /// The file or image that the base is.
    file: Option<BaseSource>,
}

/// A base outside the family of its forks.
#[derive(Clone)]
enum BaseSource {
    /// A file, which can be named as the base of a delta.
    File { path: PathBuf, format: Format },
    /// An image in a store.
    Image(StoredImage),
}

/// An image that a node is, or lies over.
#[derive(Clone)]
struct StoredImage {
    name: Name,
    tag: &'static str,
}

struct OriginNode {
    origin: Origin,
    /// A snapshot was removed during its merge: the content below is half old, half new.
    is_half: bool,
}

struct PowerNode {
    power: Arc<Power>,
    /// Durability of the node below.
    durability_below: Durability,
}

#[expect(clippy::struct_excessive_bools, reason = "four independent facts, each with a name")]
struct CowNode {
    snapshot: Snapshot,
    origin: NodeId,
    /// COW device.
    cow: NodeId,
    /// The COW device has room for all possible copies.
    ample: bool,
    /// The snapshot is merging: the origin shows its content.
    merging: bool,
    /// A merge may be recorded on the COW device, although starting it failed.
    maybe_marked: bool,
    /// The snapshot was lost when its disks died, the COW device does not record that, and the
    /// origin no longer waited for that record.
    unmarked: bool,
}

struct FamilyNode {
    family: Family,
    /// An empty disk, used to query statistics.
    probe: Ram,
    backing: Option<DiskId>,
    /// The family had a limit at some time.
    limited: bool,
}

/// Number of causes of failures so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Causes {
    errors: u64,
    hung: u64,
}

// ---- queries --------------------------------------------------------------------------------

impl World {
    /// Creates an empty world.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of occurrences of each kind of event.
    pub fn tally(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// Returns all nodes that receive requests.
    pub fn targets(&self) -> Vec<NodeId> {
        self.nodes_that(|node| !node.covered)
    }

    /// Returns the name of a node.
    pub fn name(&self, id: NodeId) -> String {
        self.nodes.get(&id).map_or_else(|| format!("node {id} (gone)"), |node| node.name.clone())
    }

    /// Returns true if no request to the node is in flight.
    pub fn is_idle(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_none_or(|node| node.users == 0)
    }

    /// Returns the contract violations that the disks observed.
    pub fn complaints(&self) -> Vec<String> {
        self.disks.iter().flat_map(|(id, disk)| named(*id, disk.complaints())).collect()
    }

    fn nodes_that(&self, is: impl Fn(&Node) -> bool) -> Vec<NodeId> {
        self.nodes
            .iter()
            .filter(|(id, node)| !self.paused.contains(id) && is(node))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Counts the causes so far of failures on these disks.
    fn causes(&self, disks: &BTreeSet<DiskId>) -> Causes {
        let mut causes = Causes::default();
        for injected in disks.iter().filter_map(|id| self.disks.get(id)).map(DiskControl::injected) {
            causes.errors += injected.errors();
            causes.hung += injected.hung;
        }
        for injected in disks.iter().filter_map(|id| self.injectors.get(id)).map(Injector::causes) {
            causes.errors += injected.errors;
            causes.hung += injected.hung;
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

    /// Returns true if the node uses memory that has or had a limit.
    fn is_limited(&self, node: &Node) -> bool {
        node.families.iter().any(|&family| self.families[family].limited)
    }

    // ---- changes --------------------------------------------------------------------------------

    fn new_id(&mut self) -> u32 {
        self.ids += 1;
        self.ids
    }

    fn new_oracle(&self, name: &str, bytes: u64, durability: Durability) -> Oracle {
        Oracle::timed(name, bytes / SECTOR_BYTES as u64, durability, &self.clock)
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

    /// Adds a node over others, which it covers.
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
                // A snapshot lies on its origin and does not cover it.
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

    /// Ends a verb without anything to judge.
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

    /// Returns a new path for a file.
    fn new_path(&mut self, name: &str) -> Option<PathBuf> {
        let number = self.new_id();
        if self.dir.is_none() {
            self.dir = Some(tempfile::tempdir().expect("a directory for files"));
        }
        self.dir.as_ref().map(|dir| dir.path().join(format!("{name}-{number}")))
    }

    /// Returns the next write number.
    fn next_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }
}

fn named(id: DiskId, complaints: Vec<String>) -> impl Iterator<Item = String> {
    complaints.into_iter().map(move |complaint| format!("disk {id}: {complaint}"))
}

/// Picks one of these, if there are any; `u16::MAX` picks the last.
fn pick<T: Copy>(all: &[T], number: u16) -> Option<T> {
    if number == u16::MAX {
        all.last().copied()
    } else {
        all.get(usize::from(number) % all.len().max(1)).copied()
    }
}
