//! A stack of devices, and what each of them may hold.
//!
//! A **node** is a device that requests go to, or that others lie on. What lies under another node
//! is **covered**: it gets no requests of its own, since all that writes it goes through its cover.
//! Each node has an oracle; a cover that changes nothing has that of the node below.
//!
//! An op is done in three steps, so that the same world serves one thread and many:
//! [`World::begin_io`] and [`World::begin`] look at the world and tell the oracles; what they
//! return is then done without the world; and what came of it is judged with the world again.

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
pub use begin::About;
use failing::Injector;
use focus::Focused;
use images::Images;
use io::Leaving;
pub use io::Task;

/// Nodes at one time; ops that would make more do nothing.
const NODES_MAX: usize = 24;
/// Families at one time.
const FAMILIES_MAX: usize = 3;

/// Number of a node; never used again.
pub type NodeId = u32;
/// Number of a disk, also after it was opened again.
pub type DiskId = u32;
/// Number of an oracle.
type OracleId = u32;

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wrong {
    /// A read found what it must not find.
    Content(Violation),
    /// Anything else.
    Said(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Content(violation) => violation.fmt(f),
            Self::Said(what) => f.write_str(what),
        }
    }
}

impl From<Violation> for Wrong {
    fn from(violation: Violation) -> Self {
        Self::Content(violation)
    }
}

/// Says what is wrong.
pub(crate) fn wrong<T>(what: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong::Said(what.into()))
}

/// What is to be done without the world; it may wait for devices.
pub type Act = Box<dyn FnOnce() -> Finish + Send>;
/// What is to be done with the world when that has ended.
pub type Finish = Box<dyn FnOnce(&mut World) -> Result<(), Wrong> + Send>;

#[expect(clippy::unnecessary_wraps, reason = "as those that use it return it")]
fn act(act: impl FnOnce() -> Finish + Send + 'static) -> Option<Act> {
    Some(Box::new(act))
}

fn finish(finish: impl FnOnce(&mut World) -> Result<(), Wrong> + Send + 'static) -> Finish {
    Box::new(finish)
}

/// The devices of one run, and what they stand on.
#[derive(Default)]
pub struct World {
    nodes: BTreeMap<NodeId, Node>,
    oracles: BTreeMap<OracleId, Oracle>,
    /// Of all of them, so that what happened on several can be put in order.
    clock: Clock,
    families: Vec<FamilyNode>,
    disks: BTreeMap<DiskId, DiskControl>,
    /// What else has causes of failures.
    injectors: BTreeMap<DiskId, Injector>,
    /// Numbers that were given out.
    ids: u32,
    writes: u64,
    /// Where files lie, once there are any.
    dir: Option<TempDir>,
    images: Option<Images>,
    /// Nodes that are being changed get no requests.
    held: BTreeSet<NodeId>,
    /// Verbs that make room, or change limits: those that began, and those that ended.
    frees: u64,
    leaving: Leaving,
    focused: Option<Focused>,
    /// What happened, for the report.
    tally: BTreeMap<&'static str, u64>,
}

/// A device, see the module.
struct Node {
    name: String,
    kind: Kind,
    device: Arc<dyn Device>,
    oracle: OracleId,
    /// What it lies on.
    on: Vec<NodeId>,
    covered: bool,
    /// The disks that its requests may come to, and what else may fail on their way.
    disks: BTreeSet<DiskId>,
    /// Likewise the families.
    families: BTreeSet<usize>,
    /// The causes of failures when it was made.
    since: Causes,
    /// Something had gone wrong before that, in its former life.
    trouble: bool,
    /// Requests in flight.
    users: u32,
}

enum Kind {
    Disk(DiskId),
    Memory,
    /// With the number under which its failures are counted.
    File(DiskId),
    Ram(RamNode),
    Origin(OriginNode),
    Cow(CowNode),
    Power(PowerNode),
    /// A file or image that is only read.
    Base(Bottom),
    /// Changes nothing; it may fail.
    Layer,
}

struct RamNode {
    ram: Ram,
    family: usize,
    /// What it was made over, also of a snapshot its origin; `None` is zeroes.
    below: Option<Below>,
}

/// What lies below a fork, and below its snapshots.
#[derive(Clone)]
struct Below {
    shows: Arc<Oracle>,
    /// At the bottom of it, where that is none of the family's.
    device: Option<Arc<dyn Device>>,
    /// The file or image that this is.
    file: Option<Bottom>,
}

/// What forks stand on that is none of their family's.
#[derive(Clone)]
enum Bottom {
    /// Can be named as the base of a delta.
    File { path: PathBuf, format: Format },
    /// In a store.
    Image(Stored),
}

/// The image that a node is, or lies over.
#[derive(Clone)]
struct Stored {
    name: Name,
    tag: &'static str,
}

struct OriginNode {
    origin: Origin,
    /// A snapshot was removed in the midst of its merge: what lies below is half old, half new.
    is_half: bool,
}

struct PowerNode {
    power: Arc<Power>,
    /// What a crash leaves of the node below.
    was: Durability,
}

#[expect(clippy::struct_excessive_bools, reason = "four independent facts, each with a name")]
struct CowNode {
    snapshot: Snapshot,
    origin: NodeId,
    /// The COW device.
    cow: NodeId,
    /// There is room for all that could be copied.
    ample: bool,
    /// It plays the origin's part.
    merging: bool,
    /// A merge may have been marked, though it was answered with an error.
    maybe_marked: bool,
    /// When its disks died it was lost, its COW device did not say so, and the origin did not wait
    /// for that any more.
    unmarked: bool,
}

struct FamilyNode {
    family: Family,
    /// Holds nothing; asked for numbers.
    probe: Ram,
    backing: Option<DiskId>,
    /// It had a limit at some time.
    limited: bool,
}

/// Causes of failures so far, of some disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Causes {
    errors: u64,
    hung: u64,
}

// ---- looking at it ------------------------------------------------------------------------------

impl World {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// How often what happened.
    pub fn tally(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// All nodes that get requests.
    pub fn targets(&self) -> Vec<NodeId> {
        self.nodes_that(|node| !node.covered)
    }

    /// Its name.
    pub fn name(&self, id: NodeId) -> String {
        self.nodes.get(&id).map_or_else(|| format!("node {id} (gone)"), |node| node.name.clone())
    }

    /// Whether requests to it are in flight.
    pub fn is_quiet(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_none_or(|node| node.users == 0)
    }

    /// What the disks' users did wrong.
    pub fn complaints(&self) -> Vec<String> {
        self.disks.iter().flat_map(|(id, disk)| named(*id, disk.complaints())).collect()
    }

    fn nodes_that(&self, is: impl Fn(&Node) -> bool) -> Vec<NodeId> {
        self.nodes
            .iter()
            .filter(|(id, node)| !self.held.contains(id) && is(node))
            .map(|(id, _)| *id)
            .collect()
    }

    /// The causes so far of failures of what lies on these disks.
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

    /// Whether something went wrong below a node since it was made, so that it may be worse off for
    /// good.
    fn had_trouble(&self, node: &Node) -> bool {
        let below = || node.on.iter().filter_map(|id| self.nodes.get(id));
        node.trouble || self.causes(&node.disks) != node.since || below().any(|below| self.had_trouble(below))
    }

    /// Whether a node lies on memory that has, or had, a limit.
    fn is_limited(&self, node: &Node) -> bool {
        node.families.iter().any(|&family| self.families[family].limited)
    }

    // ---- changing it ----------------------------------------------------------------------------

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

    /// A node over others, which it covers.
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
                trouble: false,
                users: 0,
            },
        );
        id
    }

    /// A verb gave nothing to judge.
    fn abandon(&mut self, oracle: OracleId, token: ReadToken) {
        if let Some(oracle) = self.oracles.get_mut(&oracle) {
            oracle.abandon(token);
        }
    }

    /// Drops oracles that no node has.
    fn sweep(&mut self) {
        let used: BTreeSet<OracleId> = self.nodes.values().map(|node| node.oracle).collect();
        self.oracles.retain(|id, _| used.contains(id));
    }

    /// A file that is not there yet.
    fn new_path(&mut self, name: &str) -> Option<PathBuf> {
        let number = self.new_id();
        if self.dir.is_none() {
            self.dir = Some(tempfile::tempdir().expect("a directory for files"));
        }
        self.dir.as_ref().map(|dir| dir.path().join(format!("{name}-{number}")))
    }

    /// The next number of a write.
    fn next_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }
}

fn named(id: DiskId, complaints: Vec<String>) -> impl Iterator<Item = String> {
    complaints.into_iter().map(move |complaint| format!("disk {id}: {complaint}"))
}

/// One of these, if there is one; the largest number is the last of them.
fn pick<T: Copy>(all: &[T], number: u16) -> Option<T> {
    if number == u16::MAX {
        all.last().copied()
    } else {
        all.get(usize::from(number) % all.len().max(1)).copied()
    }
}
