//! What uses a disk dies, with the power or without, and is opened again.
//!
//! A **tree** is a disk and all that lies on it. An origin over the disk, and snapshots of it whose
//! stores persist on disks of their own, come back; the rest of the tree ends with the process.

use std::collections::BTreeSet;

use freestone::cow::{self, MergeStatus, Origin, Snapshot, Status};
use freestone::device::Device;
use freestone::null::{Config, Memory};

use super::{Act, CowNode, Kind, Node, NodeId, OriginNode, World, Wrong, act, finish, wrong};
use crate::disk::{DiskControl, SimDisk};
use crate::oracle::{Durability, Oracle};
use crate::rt::sync::Arc;

/// A snapshot that comes back.
struct Store {
    id: NodeId,
    control: DiskControl,
    config: cow::Config,
    node: Option<Before>,
}

/// What is known of it.
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
struct Before {
    origin: NodeId,
    cow: NodeId,
    ample: bool,
    merging: bool,
    maybe_marked: bool,
    unmarked: bool,
}

/// A disk that was opened again.
struct Again {
    id: NodeId,
    control: DiskControl,
    device: Arc<dyn Device>,
}

impl Again {
    fn open(id: NodeId, control: &DiskControl, seed: u64) -> Self {
        let disk: SimDisk = control.reopened(seed);
        Self { id, control: disk.control(), device: Arc::new(disk) }
    }
}

/// Stands where a device will be again; nobody asks it.
fn gone_device() -> Arc<dyn Device> {
    Arc::new(Memory::new(Config::plain(4096, 512)).expect("a page"))
}

impl World {
    /// Disks whose tree can be opened again.
    pub(super) fn crashable(&self) -> Vec<NodeId> {
        let all = self.nodes_that(|node| matches!(node.kind, Kind::Disk(_)));
        all.into_iter().filter(|&id| self.can_reopen(id)).collect()
    }

    fn can_reopen(&self, id: NodeId) -> bool {
        let Some(node) = self.nodes.get(&id) else { return false };
        let origin = self.origin_on(id).and_then(|id| self.nodes.get(&id));
        let is_half = origin.is_some_and(|node| matches!(&node.kind, Kind::Origin(origin) if origin.is_half));
        // Merges whose store does not come back would leave an origin of which nobody knows what it
        // holds.
        let persistent = self.persistent(id);
        let lost_merge = self.tree(id).into_iter().any(|id| {
            let is_merging = |node: &Node| matches!(&node.kind, Kind::Cow(cow) if cow.merging);
            self.nodes.get(&id).is_some_and(is_merging) && !persistent.contains(&id)
        });
        // Below something else than an origin there is nothing that could be opened.
        !self.is_cow_device(id) && !is_half && !lost_merge && (!node.covered || origin.is_some())
    }

    fn is_cow_device(&self, id: NodeId) -> bool {
        self.nodes.values().any(|node| matches!(&node.kind, Kind::Cow(cow) if cow.cow == id))
    }

    pub(super) fn origin_on(&self, disk: NodeId) -> Option<NodeId> {
        let is = |node: &Node| matches!(node.kind, Kind::Origin(_)) && node.on.contains(&disk);
        self.nodes.iter().find(|(_, node)| is(node)).map(|(id, _)| *id)
    }

    /// A disk and all that lies on it, and the COW devices of that: what lies on others comes after
    /// them.
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

    /// Snapshots of a tree that come back.
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

    /// The disks of a tree die at one moment.
    pub(super) fn tree_dies(&mut self, disk: NodeId, power: bool, seed: u64) {
        let mut controls = Vec::new();
        for id in self.tree(disk) {
            if let Some(Kind::Disk(number)) = self.nodes.get(&id).map(|node| &node.kind) {
                controls.extend(self.disks.get(number).cloned());
            }
        }
        DiskControl::all_die(&controls, seed, power);
        // Not later: a disk that is dead does not say so either.
        for id in self.persistent(disk) {
            if let Some(Kind::Cow(cow)) = self.nodes.get_mut(&id).map(|node| &mut node.kind) {
                cow.unmarked = cow.snapshot.is_unmarked();
            }
        }
    }

    /// Ends what is left of the tree and opens it again. Its requests were answered.
    pub(super) fn reopen(&mut self, disk: NodeId, power: bool, seed: u64) -> Option<Act> {
        self.count(if power { "crashes with the power" } else { "crashes" });
        let origin = self.origin_on(disk);
        let control = self.control(disk)?;
        let mut stores = Vec::new();
        let mut kept: Vec<NodeId> = vec![disk];
        kept.extend(origin);
        for id in self.persistent(disk) {
            let Kind::Cow(node) = &self.nodes.get(&id)?.kind else { continue };
            let CowNode { origin, cow, ample, merging, maybe_marked, unmarked, .. } = *node;
            let before = Before { origin, cow, ample, merging, maybe_marked, unmarked };
            let (control, config) = (self.control(cow)?, node.snapshot.config());
            stores.push(Store { id, control, config, node: Some(before) });
            kept.extend([id, cow]);
        }
        let mut gone = Vec::new();
        for id in self.tree(disk).into_iter().rev().filter(|id| !kept.contains(id)) {
            // A COW device goes with its snapshot.
            if !self.is_cow_device(id) {
                self.take(id, &mut gone);
            }
        }
        // Their handles go as well, those on top first.
        let mut handles: Vec<(Kind, Arc<dyn Device>)> = Vec::new();
        for id in kept.iter().rev() {
            let trouble = self.nodes.get(id).is_some_and(|node| self.had_trouble(node));
            if let Some(node) = self.nodes.get_mut(id) {
                node.trouble = trouble;
                let none: Arc<dyn Device> = gone_device();
                let kind = std::mem::replace(&mut node.kind, Kind::Layer);
                handles.push((kind, std::mem::replace(&mut node.device, none)));
            }
        }
        // What a power layer had not written below dies with the process.
        let loses = power || gone.iter().any(|node| matches!(node.kind, Kind::Power(_)));
        let oracles: BTreeSet<u32> =
            kept.iter().filter_map(|id| self.nodes.get(id)).map(|node| node.oracle).collect();
        for id in oracles {
            if let Some(oracle) = self.oracles.get_mut(&id) {
                if loses { oracle.crash() } else { oracle.die() }
            }
        }
        self.sweep();
        self.leaving.begins();
        act(move || {
            drop(gone);
            handles.into_iter().for_each(drop);
            let below = Again::open(disk, &control, seed ^ 1);
            let opened = origin.map(|id| (id, Origin::new(Arc::clone(&below.device))));
            let mut snapshots = Vec::new();
            for (store, seed) in stores.into_iter().zip(seed.wrapping_add(2)..) {
                let cow = store.node.as_ref().map_or(0, |node| node.cow);
                let again = Again::open(cow, &store.control, seed);
                let config = cow::Config { chunk_bytes: None, ..store.config };
                let snapshot =
                    opened.as_ref().map(|(_, origin)| origin.snapshot(Arc::clone(&again.device), &config));
                snapshots.push((store, again, snapshot));
            }
            finish(move |world| {
                world.leaving.ends();
                world.disk_is_back(below, origin.is_some());
                if let Some((id, origin)) = opened {
                    let device: Arc<dyn Device> = Arc::new(origin.clone());
                    world.is_back(id, Kind::Origin(OriginNode { origin, is_half: false }), device);
                }
                let mut opened = Vec::new();
                for (store, again, snapshot) in snapshots {
                    world.disk_is_back(again, true);
                    match (snapshot, store.node) {
                        (Some(Ok(snapshot)), Some(before)) => opened.push((store.id, snapshot, before)),
                        (Some(Err(error)), _) => {
                            return wrong(format!(
                                "{} could not be opened again: {error}",
                                world.name(store.id)
                            ));
                        }
                        _ => {}
                    }
                }
                // All of them, since the merge of one is the origin's content.
                let is_half =
                    opened.iter().any(|(_, snapshot, _)| snapshot.merge_status() == MergeStatus::Stopped);
                opened.into_iter().try_for_each(|(id, snapshot, before)| {
                    world.store_is_back(id, snapshot, &before, is_half)
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

    fn is_back(&mut self, id: NodeId, kind: Kind, device: Arc<dyn Device>) {
        let disks = self.nodes.get(&id).map(|node| node.disks.clone()).unwrap_or_default();
        let since = self.causes(&disks);
        if let Some(node) = self.nodes.get_mut(&id) {
            (node.kind, node.device, node.since) = (kind, device, since);
        }
    }

    fn disk_is_back(&mut self, Again { id, control, device }: Again, covered: bool) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.covered = covered;
        let Some(&number) = node.disks.first() else { return };
        self.disks.insert(number, control);
        self.is_back(id, Kind::Disk(number), device);
    }

    /// `is_half`: the origin below is half merged.
    fn store_is_back(
        &mut self,
        id: NodeId,
        snapshot: Snapshot,
        before: &Before,
        is_half: bool,
    ) -> Result<(), Wrong> {
        let status = snapshot.merge_status();
        let &Before { origin, cow, ample, merging, maybe_marked, unmarked } = before;
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let plays = status == MergeStatus::Stopped;
        let merges = merging && plays;
        let kind = CowNode { snapshot, origin, cow, ample, merging: merges, maybe_marked, unmarked: false };
        let is_valid = kind.snapshot.status() != Status::Invalid;
        self.is_back(id, Kind::Cow(kind), device);
        if unmarked && is_valid && !merging {
            // Where the header that says so could not be written for two seconds, the origin was
            // written all the same, and so the snapshot shows anything.
            self.count("lost snapshots that came back");
            self.take(id, &mut Vec::new());
            return Ok(());
        }
        if plays && !merging {
            if !maybe_marked {
                return wrong(format!("{} plays its origin's part, and no merge was begun", self.name(id)));
            }
            self.plays_origin(id, None);
        }
        if merging && !plays && is_half {
            // It was merged to its end before another one began to be: now it is a new snapshot of
            // what is half merged, which only an origin with notes would refuse.
            self.take(id, &mut Vec::new());
            return Ok(());
        }
        if merging && !plays {
            // It was merged to its end: it is a new snapshot of the origin.
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
