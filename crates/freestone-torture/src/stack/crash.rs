//! Crashes: the users of a disk die, with or without a power loss, and everything persistent is
//! opened again.
//!
//! A **tree** is a disk and all nodes on it. An origin over the disk, and its snapshots with
//! persistent COW devices on disks of their own, survive a crash. The rest of the tree ends with
//! the process.

use std::collections::BTreeSet;

use freestone::cow::{self, MergeStatus, Origin, Snapshot, Status};
use freestone::device::Device;
use freestone::null::{Config, Memory};

use super::{CowNode, Finding, Kind, Node, NodeId, OriginNode, VerbTask, World, act, finding, finish};
use crate::disk::{DiskControl, SimDisk};
use crate::oracle::{Durability, Oracle};
use crate::rt::sync::Arc;

/// A snapshot that survives a crash, with what is needed to open it again.
struct SurvivingSnapshot {
    id: NodeId,
    control: DiskControl,
    config: cow::Config,
    node: Option<SnapshotState>,
}

/// The state of a surviving snapshot before the crash.
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
struct SnapshotState {
    origin: NodeId,
    cow: NodeId,
    ample: bool,
    merging: bool,
    maybe_marked: bool,
    unmarked: bool,
}

/// A simulated disk that was opened again after a crash.
struct ReopenedDisk {
    id: NodeId,
    control: DiskControl,
    device: Arc<dyn Device>,
}

impl ReopenedDisk {
    fn open(id: NodeId, control: &DiskControl, seed: u64) -> Self {
        let disk: SimDisk = control.reopen(seed);
        Self { id, control: disk.control(), device: Arc::new(disk) }
    }
}

/// Returns a placeholder for a surviving node whose device was dropped and will be opened again.
/// The placeholder receives no requests.
fn placeholder_device() -> Arc<dyn Device> {
    Arc::new(Memory::new(Config::plain(4096, 512)).expect("a page"))
}

impl World {
    /// Returns the disks whose tree can be crashed and opened again.
    pub(super) fn crashable(&self) -> Vec<NodeId> {
        let all = self.nodes_that(|node| matches!(node.kind, Kind::Disk(_)));
        all.into_iter().filter(|&id| self.can_reopen(id)).collect()
    }

    fn can_reopen(&self, id: NodeId) -> bool {
        let Some(node) = self.nodes.get(&id) else { return false };
        let origin = self.origin_on(id).and_then(|id| self.nodes.get(&id));
        let is_half = origin.is_some_and(|node| matches!(&node.kind, Kind::Origin(origin) if origin.is_half));
        // If the COW device of a merging snapshot does not survive, the content of the origin is
        // unknown.
        let persistent = self.persistent(id);
        let lost_merge = self.tree(id).into_iter().any(|id| {
            let is_merging = |node: &Node| matches!(&node.kind, Kind::Cow(cow) if cow.merging);
            self.nodes.get(&id).is_some_and(is_merging) && !persistent.contains(&id)
        });
        // Of the covers of a disk, only an origin can be opened again.
        !self.is_cow_device(id) && !is_half && !lost_merge && (!node.covered || origin.is_some())
    }

    fn is_cow_device(&self, id: NodeId) -> bool {
        self.nodes.values().any(|node| matches!(&node.kind, Kind::Cow(cow) if cow.cow == id))
    }

    pub(super) fn origin_on(&self, disk: NodeId) -> Option<NodeId> {
        let is = |node: &Node| matches!(node.kind, Kind::Origin(_)) && node.on.contains(&disk);
        self.nodes.iter().find(|(_, node)| is(node)).map(|(id, _)| *id)
    }

    /// Returns a disk, all nodes on it, and the COW devices of snapshots among them. Each node
    /// comes after the nodes on which it lies.
    pub(super) fn tree(&self, disk: NodeId) -> Vec<NodeId> {
        let mut all = vec![disk];
        let mut at = 0;
        while at < all.len() {
            let id = all[at];
            for (&over, node) in &self.nodes {
                if node.on.contains(&id) && !all.contains(&over) {
                    all.push(over);
                }
            }
            if let Some(Kind::Cow(cow)) = self.nodes.get(&id).map(|node| &node.kind)
                && !all.contains(&cow.cow)
            {
                all.push(cow.cow);
            }
            at += 1;
        }
        all
    }

    /// Returns the snapshots of a tree that survive a crash.
    fn persistent(&self, disk: NodeId) -> Vec<NodeId> {
        let origin = self.origin_on(disk);
        let all = self.tree(disk);
        let mut persistent: Vec<NodeId> = all
            .into_iter()
            .filter(|id| match self.nodes.get(id).map(|node| &node.kind) {
                Some(Kind::Cow(cow)) => {
                    Some(cow.origin) == origin
                        && cow.snapshot.kind().is_persistent()
                        && matches!(self.nodes.get(&cow.cow).map(|node| &node.kind), Some(Kind::Disk(_)))
                }
                _ => false,
            })
            .collect();
        persistent.sort_unstable();
        persistent
    }

    /// Kills all disks of a tree at one moment.
    pub(super) fn kill_tree(&mut self, disk: NodeId, power: bool, seed: u64) {
        let mut controls = Vec::new();
        for id in self.tree(disk) {
            if let Some(Kind::Disk(number)) = self.nodes.get(&id).map(|node| &node.kind) {
                controls.extend(self.disks.get(number).cloned());
            }
        }
        DiskControl::kill_all(&controls, seed, power);
        // Read this state now, before the snapshots are dropped: a dead disk cannot record it
        // either.
        for id in self.persistent(disk) {
            if let Some(Kind::Cow(cow)) = self.nodes.get_mut(&id).map(|node| &mut node.kind) {
                cow.unmarked = cow.snapshot.is_unmarked();
            }
        }
    }

    /// Drops all devices of the tree and opens the surviving ones again. All requests to the tree
    /// have completed.
    pub(super) fn reopen(&mut self, disk: NodeId, power: bool, seed: u64) -> Option<VerbTask> {
        self.count(if power { "crashes with the power" } else { "crashes" });
        let origin = self.origin_on(disk);
        let control = self.control(disk)?;
        let mut stores = Vec::new();
        let mut survivors: Vec<NodeId> = vec![disk];
        survivors.extend(origin);
        for id in self.persistent(disk) {
            let Kind::Cow(node) = &self.nodes.get(&id)?.kind else { continue };
            let CowNode { origin, cow, ample, merging, maybe_marked, unmarked, .. } = *node;
            let before = SnapshotState { origin, cow, ample, merging, maybe_marked, unmarked };
            let (control, config) = (self.control(cow)?, node.snapshot.config());
            stores.push(SurvivingSnapshot { id, control, config, node: Some(before) });
            survivors.extend([id, cow]);
        }
        let mut gone = Vec::new();
        for id in self.tree(disk).into_iter().rev().filter(|id| !survivors.contains(id)) {
            // A COW device is removed together with its snapshot.
            if !self.is_cow_device(id) {
                self.remove_node(id, &mut gone);
            }
        }
        // Drop the device handles of surviving nodes as well, topmost first, so that the devices
        // can be opened again.
        let mut handles: Vec<(Kind, Arc<dyn Device>)> = Vec::new();
        for id in survivors.iter().rev() {
            let had_failure = self.nodes.get(id).is_some_and(|node| self.may_be_damaged(node));
            if let Some(node) = self.nodes.get_mut(id) {
                node.had_failure = had_failure;
                let none: Arc<dyn Device> = placeholder_device();
                let kind = std::mem::replace(&mut node.kind, Kind::Layer);
                handles.push((kind, std::mem::replace(&mut node.device, none)));
            }
        }
        // Data that a power layer had not yet written to the device below is lost with the process.
        let loses = power || gone.iter().any(|node| matches!(node.kind, Kind::Power(_)));
        let oracles: BTreeSet<u32> =
            survivors.iter().filter_map(|id| self.nodes.get(id)).map(|node| node.oracle).collect();
        for id in oracles {
            if let Some(oracle) = self.oracles.get_mut(&id) {
                if loses { oracle.crash() } else { oracle.die() }
            }
        }
        self.sweep();
        self.removals.start();
        act(move || {
            drop(gone);
            handles.into_iter().for_each(drop);
            let below = ReopenedDisk::open(disk, &control, seed ^ 1);
            let opened = origin.map(|id| (id, Origin::new(Arc::clone(&below.device))));
            let mut snapshots = Vec::new();
            for (store, seed) in stores.into_iter().zip(seed.wrapping_add(2)..) {
                let cow = store.node.as_ref().map_or(0, |node| node.cow);
                let reopened = ReopenedDisk::open(cow, &store.control, seed);
                let config = cow::Config { chunk_bytes: None, ..store.config };
                let snapshot =
                    opened.as_ref().map(|(_, origin)| origin.snapshot(Arc::clone(&reopened.device), &config));
                snapshots.push((store, reopened, snapshot));
            }
            finish(move |world| {
                world.removals.finish();
                world.restore_disk(below, origin.is_some());
                if let Some((id, origin)) = opened {
                    let device: Arc<dyn Device> = Arc::new(origin.clone());
                    world.restore_node(id, Kind::Origin(OriginNode { origin, is_half: false }), device);
                }
                let mut opened = Vec::new();
                for (store, reopened, snapshot) in snapshots {
                    world.restore_disk(reopened, true);
                    match (snapshot, store.node) {
                        (Some(Ok(snapshot)), Some(before)) => opened.push((store.id, snapshot, before)),
                        (Some(Err(error)), _) => {
                            return finding(format!(
                                "{} could not be opened again: {error}",
                                world.name(store.id)
                            ));
                        }
                        _ => {}
                    }
                }
                // Compute this over all snapshots: a stopped merge of any snapshot affects the
                // content of the origin.
                let is_half =
                    opened.iter().any(|(_, snapshot, _)| snapshot.merge_status() == MergeStatus::Stopped);
                opened.into_iter().try_for_each(|(id, snapshot, before)| {
                    world.restore_snapshot(id, snapshot, &before, is_half)
                })
            })
        })
    }

    fn control(&self, id: NodeId) -> Option<DiskControl> {
        match self.nodes.get(&id)?.kind {
            Kind::Disk(number) => self.disks.get(&number).cloned(),
            _ => None,
        }
    }

    fn restore_node(&mut self, id: NodeId, kind: Kind, device: Arc<dyn Device>) {
        let disks = self.nodes.get(&id).map(|node| node.disks.clone()).unwrap_or_default();
        let since = self.causes(&disks);
        if let Some(node) = self.nodes.get_mut(&id) {
            (node.kind, node.device, node.since) = (kind, device, since);
        }
    }

    fn restore_disk(&mut self, ReopenedDisk { id, control, device }: ReopenedDisk, covered: bool) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.covered = covered;
        let Some(&number) = node.disks.first() else { return };
        self.disks.insert(number, control);
        self.restore_node(id, Kind::Disk(number), device);
    }

    /// Restores the node of a snapshot. `is_half`: the merge of some snapshot into the origin was
    /// stopped half way.
    fn restore_snapshot(
        &mut self,
        id: NodeId,
        snapshot: Snapshot,
        before: &SnapshotState,
        is_half: bool,
    ) -> Result<(), Finding> {
        let status = snapshot.merge_status();
        let &SnapshotState { origin, cow, ample, merging, maybe_marked, unmarked } = before;
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let plays = status == MergeStatus::Stopped;
        let merges = merging && plays;
        let kind = CowNode { snapshot, origin, cow, ample, merging: merges, maybe_marked, unmarked: false };
        let is_valid = kind.snapshot.status() != Status::Invalid;
        self.restore_node(id, Kind::Cow(kind), device);
        if unmarked && is_valid && !merging {
            // If the header could not be marked invalid within two seconds, the origin was written
            // anyway. The snapshot then has undefined content.
            self.count("lost snapshots that came back");
            self.remove_node(id, &mut Vec::new());
            return Ok(());
        }
        if plays && !merging {
            if !maybe_marked {
                return finding(format!("{} is merging, but no merge was started", self.name(id)));
            }
            self.record_merge(id, None);
        }
        if merging && !plays && is_half {
            // The merge of this snapshot ended before the merge of another one started. The
            // snapshot now belongs to a half merged origin; only an origin with persistent records
            // could refuse it.
            self.remove_node(id, &mut Vec::new());
            return Ok(());
        }
        if merging && !plays {
            // The merge of this snapshot had ended, so the COW device now holds a new snapshot of
            // the origin.
            let shown = self.nodes.get(&origin).and_then(|origin| self.oracles.get_mut(&origin.oracle));
            let Some(shown) =
                shown.map(|oracle: &mut Oracle| oracle.snapshot("snapshot", Durability::Flushed))
            else {
                return Ok(());
            };
            let shown = self.add_oracle(shown);
            if let Some(node) = self.nodes.get_mut(&id) {
                node.oracle = shown;
            }
            self.rename(id);
        }
        Ok(())
    }
}
