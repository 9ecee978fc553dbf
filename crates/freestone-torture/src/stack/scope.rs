//! Dispatches ops other than requests: chooses the nodes of each op, determines which of them must
//! be idle, and starts the op.

use super::{FAMILIES_MAX, Kind, NODES_MAX, Node, NodeId, VerbTask, World};
use crate::disk::DiskControl;
use crate::ops::{CowOp, Op};

/// The nodes that an op uses, in the order in which the op names them, and those that must be idle
/// meanwhile.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    nodes: Vec<NodeId>,
    /// Nodes that must have no requests in flight before the op starts, and receive none until the
    /// op ends.
    pub idle: Vec<NodeId>,
    /// Nodes that receive no new requests until the op ends, while those in flight continue.
    paused: Vec<NodeId>,
    /// The op frees memory or changes a limit, see [`Op::frees`].
    freeing_verbs: bool,
}

impl World {
    pub fn names(&self, scope: &Scope) -> String {
        let names: Vec<String> = scope.nodes.iter().map(|&id| self.name(id)).collect();
        names.join(", ")
    }

    /// Chooses the nodes of an op. Returns `None` if the op is not possible now or does nothing.
    pub fn scope(&self, op: &Op) -> Option<Scope> {
        let one = |all: Vec<NodeId>, number: u16| self.choose(&all, number).map(|id| vec![id]);
        let has_room = self.nodes.len() < NODES_MAX;
        let (nodes, possible) = match op {
            Op::Io(_) | Op::Check(_) | Op::Await | Op::RequestThreads(_) | Op::Focus(_) => return None,
            Op::Family { .. } => (Vec::new(), self.families.len() < FAMILIES_MAX),
            Op::Ram { .. } => (Vec::new(), has_room && !self.families.is_empty()),
            Op::Disk(_) | Op::Memory { .. } | Op::File { .. } | Op::Base { .. } | Op::Image { .. } => {
                (Vec::new(), has_room)
            }
            Op::Plan { .. }
            | Op::Room { .. }
            | Op::Shrink { .. }
            | Op::Heal(_)
            | Op::Rules { .. }
            | Op::Bad { .. }
            | Op::Cut { .. }
            | Op::StoreRules(_)
            | Op::Prune { .. } => (Vec::new(), true),
            Op::Push { nodes, .. } => (self.several(&self.pushable(), nodes), true),
            Op::Limit { .. } => (Vec::new(), !self.families.is_empty()),
            Op::Snapshot(numbers) => (self.several(&self.ram_origins(), numbers), has_room),
            Op::Moment { rams, cows } => {
                let origins: Vec<u16> = cows.iter().map(|(origin, _)| *origin).collect();
                let mut nodes = self.several(&self.ram_origins(), rams);
                nodes.extend(self.several(&self.origins(), &origins));
                (nodes, self.nodes.len() + 6 < NODES_MAX)
            }
            Op::Fork { snapshot, .. } => (one(self.forkable(), *snapshot)?, has_room),
            Op::Template { of, .. } => (one(self.forkable(), *of)?, true),
            Op::Rewind { node, .. } | Op::OwnLimits { node, .. } => (one(self.ram_live(), *node)?, true),
            Op::Grow { node, .. } => (one(self.ram_growing(), *node)?, true),
            Op::Writeback { node, .. } | Op::Recompress(node) | Op::Compact(node) => {
                (one(self.rams(), *node)?, true)
            }
            Op::Origin(node)
            | Op::Power(node)
            | Op::Wrap { node, .. }
            | Op::Faults { node, .. }
            | Op::BadBlocks { node, .. } => (one(self.coverable(), *node)?, has_room),
            Op::CowSnapshot { origin, .. } => (one(self.origins(), *origin)?, has_room),
            Op::Merge(node) | Op::StopMerge(node) | Op::WaitMerge(node) => {
                (one(self.cow_snapshots(), *node)?, true)
            }
            Op::PowerCut { node, .. } => (one(self.power_layers(), *node)?, true),
            Op::Delta { node, .. } => (one(self.overlays(), *node)?, has_room),
            Op::Changes(node) => (one(self.with_changes(), *node)?, true),
            Op::Extents(node) => (one(self.targets(), *node)?, true),
            Op::Save { nodes, .. } => {
                let nodes = self.several(&self.savable(), nodes);
                (nodes, has_room && !self.families.is_empty())
            }
            Op::Remove(node) => (one(self.removable(), *node)?, true),
            Op::Crash { tree, .. } => (one(self.crashable(), *tree)?, true),
        };
        if !possible
            || (nodes.is_empty()
                && matches!(op, Op::Snapshot(_) | Op::Save { .. } | Op::Moment { .. } | Op::Push { .. }))
        {
            return None;
        }
        let (idle, paused) = (self.must_be_idle(op, &nodes), self.must_be_paused(op, &nodes));
        Some(Scope { nodes, idle, paused, freeing_verbs: op.frees() })
    }

    fn must_be_idle(&self, op: &Op, nodes: &[NodeId]) -> Vec<NodeId> {
        match op {
            Op::Origin(_) | Op::Power(_) | Op::Wrap { .. } | Op::Faults { .. } | Op::BadBlocks { .. } => {
                nodes.to_vec()
            }
            Op::Changes(_) => self.nodes_to_pause(nodes[0]),
            // A merging snapshot and its origin share an oracle, so writes to either would change
            // the extents.
            Op::Extents(_) => {
                let oracle = self.nodes[&nodes[0]].oracle;
                self.nodes_that(|node| node.oracle == oracle)
            }
            // Include the snapshots merged into the origin before: they show the content of the
            // origin.
            Op::Merge(_) => {
                let origin = self.nodes.get(&nodes[0]).and_then(|node| self.nodes.get(node.on.first()?));
                let oracle = origin.map(|origin| origin.oracle);
                self.nodes
                    .iter()
                    .filter(|(id, node)| **id == nodes[0] || Some(node.oracle) == oracle)
                    .map(|(id, _)| *id)
                    .collect()
            }
            // Wait for writes through the removed cover: they must not arrive after the cover is
            // gone.
            Op::Remove(_) if self.nodes.get(&nodes[0]).is_some_and(|node| !node.on.is_empty()) => {
                nodes.to_vec()
            }
            Op::Crash { .. } => self.tree(nodes[0]),
            _ => Vec::new(),
        }
    }

    /// Returns nodes that receive no new requests until the op ends, since the content that these
    /// would find is unknown.
    fn must_be_paused(&self, op: &Op, nodes: &[NodeId]) -> Vec<NodeId> {
        match op {
            Op::PowerCut { .. } => nodes.to_vec(),
            // A removed power layer writes its unflushed data to the node below.
            Op::Remove(_) => match self.nodes.get(&nodes[0]) {
                Some(Node { kind: Kind::Power(_), on, .. }) => on.clone(),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Stops new requests to the nodes of an op until [`resume_nodes`](Self::resume_nodes).
    pub fn pause_nodes(&mut self, scope: &Scope) {
        self.paused.extend(scope.idle.iter().chain(&scope.paused));
    }

    /// Ends an op: its nodes receive requests again.
    pub fn resume_nodes(&mut self, scope: &Scope) {
        self.freeing_verbs += u64::from(scope.freeing_verbs);
        for id in scope.idle.iter().chain(&scope.paused) {
            self.paused.remove(id);
        }
    }

    /// Performs the part of an op that must happen before waiting for its nodes: for a crash, kills
    /// the disks.
    pub fn before_wait(&mut self, op: &Op, scope: &Scope) {
        if let Op::Crash { power, seed, .. } = op {
            self.kill_tree(scope.nodes[0], *power, *seed);
        }
    }

    /// Starts an op that is not a request. Returns the part of the op that needs no access to the
    /// [`World`], as a task for another thread; `None` if the op is finished.
    pub fn begin(&mut self, op: &Op, scope: &Scope) -> Option<VerbTask> {
        let nodes = &scope.nodes;
        self.freeing_verbs += u64::from(scope.freeing_verbs);
        match op {
            Op::Io(_) | Op::Check(_) | Op::Await | Op::RequestThreads(_) | Op::Focus(_) => None,
            Op::Family { limit_kib, algorithm, backing, auto } => {
                self.make_family(*limit_kib, *algorithm, *backing, *auto)
            }
            Op::Ram { family, kib } => self.make_ram(*family, *kib),
            Op::Disk(disk) => self.make_disk(*disk),
            Op::Memory { kib } => Self::make_memory(*kib),
            Op::File { kib } => self.make_file(*kib),
            Op::Base { kib, seed, faults } => self.make_base(*kib, *seed, *faults),
            Op::Image { kib, seed, cached } => self.make_image(*kib, *seed, *cached),
            Op::StoreRules(seed) => self.store_rules(*seed),
            Op::Push { tag, seed, .. } => self.push(nodes, *tag, *seed),
            Op::Prune { eighths, seed } => self.prune(*eighths, *seed),
            Op::Delta { applies, .. } => self.save_delta(nodes[0], *applies),
            Op::Faults { seed, .. } => self.make_faults(nodes[0], *seed),
            Op::BadBlocks { how, .. } => self.make_bad_blocks(nodes[0], *how),
            Op::Rules { layer, rules } => self.rules(*layer, rules),
            Op::Cut { file, parts } => self.cut(*file, *parts),
            Op::Bad { layer, at, sectors, good } => self.bad_blocks(*layer, *at, *sectors, *good),
            Op::Snapshot(_) => self.snapshots(nodes, &[]),
            Op::Moment { cows, .. } => {
                let is_origin = |id: &NodeId| matches!(self.nodes[id].kind, Kind::Origin(_));
                let (origins, rams): (Vec<NodeId>, Vec<NodeId>) = nodes.iter().copied().partition(is_origin);
                let origins: Vec<_> = origins.into_iter().zip(cows.iter().map(|(_, cow)| *cow)).collect();
                self.snapshots(&rams, &origins)
            }
            Op::Fork { more_sectors, cap_kib, family, .. } => {
                self.fork(nodes[0], *more_sectors, *cap_kib, *family)
            }
            Op::Template { clients, seed, family, .. } => self.template(nodes[0], *clients, *seed, *family),
            Op::Rewind { reset, .. } => self.rewind(nodes[0], *reset),
            Op::Grow { kib, .. } => self.grow(nodes[0], *kib),
            Op::Writeback { which, .. } => self.writeback(nodes[0], *which),
            Op::Recompress(_) => self.recompress(nodes[0]),
            Op::Compact(_) => self.compact(nodes[0]),
            Op::Limit { family, kib } => self.limit(*family, *kib),
            Op::OwnLimits { cap_kib, least_kib, .. } => self.own_limits(nodes[0], *cap_kib, *least_kib),
            Op::Origin(_) => self.make_origin(nodes[0]),
            &Op::CowSnapshot { store, chunk, ample, on, .. } => {
                self.snapshots(&[], &[(nodes[0], CowOp { store, chunk, ample, on })])
            }
            Op::Merge(_) => self.merge(nodes[0]),
            Op::StopMerge(_) => self.end_merge(nodes[0], true),
            Op::WaitMerge(_) => self.end_merge(nodes[0], false),
            Op::Power(_) => self.make_power(nodes[0]),
            Op::Changes(_) => self.changes(nodes[0]),
            Op::Extents(_) => self.extents(nodes[0]),
            Op::Save { family, whole, .. } => self.save(nodes, *family, *whole),
            Op::PowerCut { seed, .. } => self.power_cut(nodes[0], *seed),
            Op::Wrap { layer, .. } => self.make_layer(nodes[0], *layer),
            Op::Remove(_) => Some(self.remove(nodes[0])),
            Op::Crash { seed, power, .. } => self.reopen(nodes[0], *power, *seed),
            Op::Plan { disk, plan } => self.with_disk(*disk, |control| control.set_plan(*plan)),
            Op::Room { disk, kib } => {
                self.with_disk(*disk, |control| control.set_free_space(Some(u64::from(*kib) << 10)))
            }
            Op::Shrink { disk, parts } => self.with_disk(*disk, |control| {
                let size = control.bytes().len() as u64;
                control.shrink_to(Some(size * u64::from(*parts) / 1024 / 512 * 512));
            }),
            Op::Heal(None) => {
                self.heal();
                None
            }
            Op::Heal(Some(number)) => {
                self.heal_one(*number);
                None
            }
        }
    }

    fn with_disk(&self, number: u16, change: impl FnOnce(&DiskControl)) -> Option<VerbTask> {
        if let Some(disk) = self.disk_of(number).and_then(|id| self.disks.get(&id)) {
            change(disk);
        }
        None
    }
}
