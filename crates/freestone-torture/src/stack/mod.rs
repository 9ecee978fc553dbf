//! A stack of devices, and what each of them may hold.
//!
//! A **node** is a device that requests go to, or that others lie on. What lies under another node
//! is **covered**: it gets no requests of its own, since all that writes it goes through its cover.
//! Each node has an oracle; a cover that changes nothing has that of the node below.
//!
//! An op is done in three steps, so that the same world serves one thread and many:
//! [`World::begin_io`] and [`World::begin`] look at the world and tell the oracles; what they
//! return is then done without the world; and what came of it is judged with the world again.

mod cow;
mod crash;
mod io;
mod make;
mod ram;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use freestone::cow::{Origin, Snapshot};
use freestone::device::Device;
use freestone::power::Power;
use freestone::ram::{Family, Ram};

use crate::disk::{DiskControl, SimDisk};
use crate::ops::Op;
use crate::oracle::{Durability, Oracle, Violation};
use crate::rt::sync::Arc;
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

/// See the module.
#[derive(Default)]
pub struct World {
    nodes: BTreeMap<NodeId, Node>,
    oracles: BTreeMap<OracleId, Oracle>,
    families: Vec<FamilyNode>,
    disks: BTreeMap<DiskId, DiskControl>,
    /// Numbers that were given out.
    ids: u32,
    writes: u64,
    /// Nodes that are being changed get no requests.
    held: BTreeSet<NodeId>,
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
    /// The disks that its requests may come to.
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
    Ram(RamNode),
    Origin(OriginNode),
    Cow(CowNode),
    Power(PowerNode),
    /// Changes nothing.
    Layer,
}

struct RamNode {
    ram: Ram,
    family: usize,
    /// What a rewind goes back to; `None` is zeroes.
    base: Option<Arc<Oracle>>,
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

    /// The names of what an op is about.
    pub fn names(&self, about: &About) -> String {
        let names: Vec<String> = about.nodes.iter().map(|&id| self.name(id)).collect();
        names.join(", ")
    }

    /// Whether requests to it are in flight.
    pub fn is_quiet(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_none_or(|node| node.users == 0)
    }

    /// The controls of all simulated disks.
    pub fn disks(&self) -> Vec<DiskControl> {
        self.disks.values().cloned().collect()
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

    /// Drops oracles that no node has.
    fn sweep(&mut self) {
        let used: BTreeSet<OracleId> = self.nodes.values().map(|node| node.oracle).collect();
        self.oracles.retain(|id, _| used.contains(id));
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

/// One of these, if there is one.
fn pick<T: Copy>(all: &[T], number: u16) -> Option<T> {
    if all.is_empty() { None } else { Some(all[usize::from(number) % all.len()]) }
}

// ---- ops ----------------------------------------------------------------------------------------

/// The nodes that an op is about, in the order in which it names them.
#[derive(Debug, Clone, Default)]
pub struct About {
    nodes: Vec<NodeId>,
    /// These must have no requests in flight, and get none until the op is finished.
    pub quiet: Vec<NodeId>,
}

impl World {
    /// Which nodes an op is about. `None`: there is nothing for it to do.
    pub fn about(&self, op: &Op) -> Option<About> {
        let one = |all: Vec<NodeId>, number: u16| pick(&all, number).map(|id| vec![id]);
        let has_room = self.nodes.len() < NODES_MAX;
        let (nodes, possible) = match op {
            Op::Io(_) | Op::Check(_) | Op::Await => return None,
            Op::Family { .. } => (Vec::new(), self.families.len() < FAMILIES_MAX),
            Op::Ram { .. } => (Vec::new(), has_room && !self.families.is_empty()),
            Op::Disk(_) | Op::Memory { .. } => (Vec::new(), has_room),
            Op::Plan { .. } | Op::Room { .. } | Op::Shrink { .. } | Op::Heal(_) => (Vec::new(), true),
            Op::Limit { .. } => (Vec::new(), !self.families.is_empty()),
            Op::Snapshot(numbers) => {
                let all = self.ram_origins();
                let mut nodes: Vec<NodeId> =
                    numbers.iter().filter_map(|&number| pick(&all, number)).collect();
                nodes.dedup();
                (nodes, has_room)
            }
            Op::Fork { snapshot, .. } => (one(self.ram_snapshots(), *snapshot)?, has_room),
            Op::Rewind { node, .. } | Op::OwnLimits { node, .. } => (one(self.ram_live(), *node)?, true),
            Op::Grow { node, .. } => (one(self.ram_growing(), *node)?, true),
            Op::Writeback { node, .. } | Op::Recompress(node) | Op::Compact(node) => {
                (one(self.rams(), *node)?, true)
            }
            Op::Origin(node) | Op::Power(node) | Op::Wrap { node, .. } => {
                (one(self.coverable(), *node)?, has_room)
            }
            Op::CowSnapshot { origin, .. } => (one(self.origins(), *origin)?, has_room),
            Op::Merge(node) | Op::StopMerge(node) | Op::WaitMerge(node) => (one(self.cows(), *node)?, true),
            Op::PowerCut { node, .. } => (one(self.powers(), *node)?, true),
            Op::Remove(node) => (one(self.removable(), *node)?, true),
            Op::Crash { tree, .. } => (one(self.crashable(), *tree)?, true),
        };
        if !possible || (nodes.is_empty() && matches!(op, Op::Snapshot(_))) {
            return None;
        }
        let quiet = self.must_be_quiet(op, &nodes);
        Some(About { nodes, quiet })
    }

    fn must_be_quiet(&self, op: &Op, nodes: &[NodeId]) -> Vec<NodeId> {
        match op {
            Op::Origin(_) | Op::Power(_) | Op::Wrap { .. } => nodes.to_vec(),
            Op::Merge(_) => {
                let origin = self.nodes.get(&nodes[0]).and_then(|node| node.on.first().copied());
                nodes.iter().copied().chain(origin).collect()
            }
            // What is written through a cover is not to arrive when the cover is gone.
            Op::Remove(_) if self.nodes.get(&nodes[0]).is_some_and(|node| !node.on.is_empty()) => {
                nodes.to_vec()
            }
            Op::Crash { .. } => self.tree(nodes[0]),
            _ => Vec::new(),
        }
    }

    /// Nodes that are held get no requests until [`let_go`](Self::let_go).
    pub fn hold(&mut self, about: &About) {
        self.held.extend(&about.quiet);
    }

    /// The op is finished.
    pub fn let_go(&mut self, about: &About) {
        for id in &about.quiet {
            self.held.remove(id);
        }
    }

    /// What is done before the nodes are waited for.
    pub fn prelude(&mut self, op: &Op, about: &About) {
        if let Op::Crash { power, seed, .. } = op {
            self.tree_dies(about.nodes[0], *power, *seed);
        }
    }

    /// Begins an op other than requests.
    pub fn begin(&mut self, op: &Op, about: &About) -> Option<Act> {
        let nodes = &about.nodes;
        match op {
            Op::Io(_) | Op::Check(_) | Op::Await => None,
            Op::Family { limit_kib, algorithm, backing, auto } => {
                self.make_family(*limit_kib, *algorithm, *backing, *auto)
            }
            Op::Ram { family, kib } => self.make_ram(*family, *kib),
            Op::Disk(disk) => self.make_disk(*disk),
            Op::Memory { kib } => Self::make_memory(*kib),
            Op::Snapshot(_) => self.snapshot(nodes),
            Op::Fork { more_sectors, cap_kib, family, .. } => {
                self.fork(nodes[0], *more_sectors, *cap_kib, *family)
            }
            Op::Rewind { reset, .. } => self.rewind(nodes[0], *reset),
            Op::Grow { kib, .. } => self.grow(nodes[0], *kib),
            Op::Writeback { which, .. } => self.writeback(nodes[0], *which),
            Op::Recompress(_) => self.recompress(nodes[0]),
            Op::Compact(_) => self.compact(nodes[0]),
            Op::Limit { family, kib } => self.limit(*family, *kib),
            Op::OwnLimits { cap_kib, least_kib, .. } => self.own_limits(nodes[0], *cap_kib, *least_kib),
            Op::Origin(_) => self.make_origin(nodes[0]),
            Op::CowSnapshot { store, chunk, ample, on, .. } => {
                self.make_cow(nodes[0], *store, *chunk, *ample, *on)
            }
            Op::Merge(_) => self.merge(nodes[0]),
            Op::StopMerge(_) => self.end_merge(nodes[0], true),
            Op::WaitMerge(_) => self.end_merge(nodes[0], false),
            Op::Power(_) => self.make_power(nodes[0]),
            Op::PowerCut { seed, .. } => self.power_cut(nodes[0], *seed),
            Op::Wrap { layer, .. } => self.make_layer(nodes[0], *layer),
            Op::Remove(_) => Some(self.remove(nodes[0])),
            Op::Crash { seed, power, .. } => self.reopen(nodes[0], *power, *seed),
            Op::Plan { disk, plan } => self.with_disk(*disk, |control| control.set_plan(*plan)),
            Op::Room { disk, kib } => {
                self.with_disk(*disk, |control| control.set_room(Some(u64::from(*kib) << 10)))
            }
            Op::Shrink { disk, parts } => self.with_disk(*disk, |control| {
                let size = control.bytes().len() as u64;
                control.shrink_to(Some(size * u64::from(*parts) / 1024 / 512 * 512));
            }),
            Op::Heal(None) => {
                self.disks.values().for_each(DiskControl::heal);
                None
            }
            Op::Heal(Some(disk)) => self.with_disk(*disk, DiskControl::heal),
        }
    }

    fn with_disk(&self, number: u16, change: impl FnOnce(&DiskControl)) -> Option<Act> {
        let all: Vec<DiskId> = self.disks.keys().copied().collect();
        if let Some(disk) = pick(&all, number).and_then(|id| self.disks.get(&id)) {
            change(disk);
        }
        None
    }
}
