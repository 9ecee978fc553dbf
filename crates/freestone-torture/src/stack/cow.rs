//! Snapshots with exception stores, and merges.

use freestone::cow::{self, MergeSetupError, MergeStatus, Origin, SetupError, Snapshot, StoreKind};
use freestone::device::{Blocking, Device, Flags};

use super::{Act, Causes, CowNode, Kind, NodeId, OracleId, World, Wrong, act, finish, pick, wrong};
use crate::disk::{DiskConfig, SimDisk};
use crate::ops::CowOp;
use crate::oracle::{Durability, ReadToken};
use crate::rt::sync::Arc;

/// Bytes that make a device look like a new store.
const HEADER_BYTES: u64 = 4096;

/// A snapshot that is being made.
pub(super) struct Making {
    id: NodeId,
    cow: NodeId,
    ample: bool,
    config: cow::Config,
    durability: Durability,
    device: Arc<dyn Device>,
    origin: Origin,
    pub oracle: OracleId,
    pub token: ReadToken,
    before: Causes,
}

impl Making {
    /// Waits for the COW device.
    pub fn prepare(&self) -> Result<cow::PendingSnapshot, SetupError> {
        let blank = self.device.write_zeroes(0, HEADER_BYTES, Flags::FUA);
        blank.map_err(|source| SetupError::Device { what: "blanking", source })?;
        self.origin.prepare_snapshot(Arc::clone(&self.device), &self.config)
    }
}

impl World {
    /// Origins that can be given snapshots.
    pub(super) fn origins(&self) -> Vec<NodeId> {
        let mut all = self.nodes_that(|node| matches!(&node.kind, Kind::Origin(origin) if !origin.is_half));
        all.retain(|&id| self.is_shown(id));
        all
    }

    pub(super) fn cows(&self) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(node.kind, Kind::Cow(_)))
    }

    /// Chooses the COW device of a snapshot; it is none that lies on any of `set`.
    pub(super) fn prepare_cow(&mut self, id: NodeId, op: CowOp, set: &[NodeId]) -> Option<Making> {
        let CowOp { store, chunk, ample, on } = op;
        let Kind::Origin(origin) = &self.nodes.get(&id)?.kind else { return None };
        let origin = origin.origin.clone();
        let kinds = [StoreKind::Persistent, StoreKind::PersistentOverflow, StoreKind::Transient];
        let kind = kinds[usize::from(store) % kinds.len()];
        let geometry = origin.geometry();
        let chunk = 4096 << (chunk % 5);
        let chunks = geometry.size.div_ceil(chunk);
        let wanted =
            if ample { 2 * (chunks + chunks.div_ceil(chunk / 16) + 2) } else { 4 + chunks / 8 } * chunk;
        // A device of the stack as the COW device, where one is free and large enough.
        let mut free = self.coverable();
        free.retain(|&other| {
            self.can_hold(other, id, wanted) && !self.below(other).iter().any(|below| set.contains(below))
        });
        let cow = on.and_then(|number| pick(&free, number)).filter(|other| self.is_quiet(*other));
        let cow = cow.unwrap_or_else(|| {
            let config = DiskConfig {
                size: wanted,
                logical_block: geometry.logical_block,
                overlap: true,
                inline: [0, 300, 1000][store as usize / 3 % 3],
                ..DiskConfig::default()
            };
            let disk = SimDisk::new(config, self.next_write());
            self.add_disk_node("cow", disk)
        });
        if let Some(node) = self.nodes.get_mut(&cow) {
            node.covered = true;
        }
        let (device, oracle) = (Arc::clone(&self.nodes[&cow].device), self.nodes[&id].oracle);
        let before = self.causes(&self.cow_disks(id, cow));
        let is_persistent =
            kind.is_persistent() && self.lies_on_disk(id) && matches!(self.nodes[&cow].kind, Kind::Disk(_));
        let durability = if is_persistent { Durability::Flushed } else { Durability::Nothing };
        let token = self.oracles.get_mut(&oracle)?.begin_read();
        let config = cow::Config { kind, chunk_bytes: Some(chunk), force: true, ..cow::Config::default() };
        Some(Making { id, cow, ample, config, durability, device, origin, oracle, token, before })
    }

    /// A snapshot has begun.
    pub(super) fn add_cow(&mut self, making: Making, snapshot: Snapshot) {
        let Making { id, cow, ample, config, durability, oracle, token, .. } = making;
        let Some(below) = self.oracles.get_mut(&oracle) else { return };
        let shown = below.snapshot_since(token, "snapshot", durability);
        let shown = self.add_oracle(shown);
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let kind = Kind::Cow(CowNode {
            snapshot,
            origin: id,
            cow,
            ample,
            merging: false,
            maybe_marked: false,
            unmarked: false,
        });
        let made =
            self.add(&format!("snapshot ({})", kind_name(&config)), kind, device, shown, vec![id, cow]);
        self.rename(made);
    }

    /// Whether there is a cause for a snapshot that could not be prepared.
    pub(super) fn judge_cow(&self, making: &Making, error: &SetupError) -> Result<(), Wrong> {
        let &Making { id, cow, before, .. } = making;
        let now = self.causes(&self.cow_disks(id, cow));
        let causes = now != before || now.hung > 0;
        let nodes = || [id, cow].into_iter().filter_map(|id| self.nodes.get(&id));
        let limited = nodes().any(|node| self.is_limited(node));
        // A snapshot that it is to lie on may have been lost before.
        let worse_off =
            nodes().any(|node| self.remembers(node) && (self.had_trouble(node) || self.is_short(node)));
        match error {
            SetupError::Merging if self.has_merge(id) => Ok(()),
            SetupError::NotInTime(_) if self.has_hung() => Ok(()),
            SetupError::Device { .. } if causes || limited || worse_off => Ok(()),
            SetupError::TooSmall { .. } | SetupError::OddSize { .. } | SetupError::Block { .. } => Ok(()),
            error => wrong(format!("a snapshot could not be made: {error}")),
        }
    }

    /// A snapshot was not made: nobody needs its COW device, nor what that lies on.
    pub(super) fn give_up(&mut self, making: Making) {
        self.abandon(making.oracle, making.token);
        let mut gone = Vec::new();
        // What it lies on has its content: a part of a store, perhaps.
        for id in self.below(making.cow) {
            self.take(id, &mut gone);
        }
        self.sweep();
    }

    fn cow_disks(&self, origin: NodeId, cow: NodeId) -> std::collections::BTreeSet<u32> {
        let nodes = [origin, cow];
        let disks =
            nodes.iter().filter_map(|id| self.nodes.get(id)).flat_map(|node| node.disks.iter().copied());
        disks.collect()
    }

    fn is_half(&self, origin: NodeId) -> bool {
        let node = self.nodes.get(&origin);
        node.is_some_and(|node| matches!(&node.kind, Kind::Origin(origin) if origin.is_half))
    }

    /// Whether a node can be the COW device of an origin: nothing of the one lies on the other.
    fn can_hold(&self, cow: NodeId, origin: NodeId, bytes: u64) -> bool {
        let node = &self.nodes[&cow];
        let is_plain =
            matches!(node.kind, Kind::Ram(_) | Kind::Disk(_) | Kind::Memory | Kind::File(_) | Kind::Layer);
        is_plain
            && node.device.geometry().size >= bytes
            && !self.below(origin).contains(&cow)
            && !self.below(cow).contains(&origin)
    }

    /// A node, and all that it lies on.
    pub(super) fn below(&self, id: NodeId) -> Vec<NodeId> {
        let mut all = vec![id];
        let mut at = 0;
        while at < all.len() {
            if let Some(node) = self.nodes.get(&all[at]) {
                all.extend(&node.on);
            }
            at += 1;
        }
        all
    }

    /// Whether this is an origin that lies on a disk itself, which can be opened again.
    pub(super) fn lies_on_disk(&self, id: NodeId) -> bool {
        let below = self.nodes.get(&id).and_then(|node| self.nodes.get(node.on.first()?));
        below.is_some_and(|below| matches!(below.kind, Kind::Disk(_)))
    }

    pub(super) fn merge(&mut self, id: NodeId) -> Option<Act> {
        let (node, Kind::Cow(cow)) = (&self.nodes[&id], &self.nodes[&id].kind) else { return None };
        let (snapshot, origin, merging) = (cow.snapshot.clone(), cow.origin, cow.merging);
        let is_covered = node.covered;
        // What is over the snapshot would have to share its oracle with the origin's covers.
        if is_covered || self.nodes.get(&origin).is_none_or(|origin| origin.covered) {
            return None;
        }
        let oracle = self.nodes[&origin].oracle;
        let token = self.oracles.get_mut(&oracle)?.begin_read();
        act(move || {
            let begun = snapshot.merge();
            finish(move |world| {
                world.count("merges");
                let Some(node) = world.nodes.get(&id) else { return Ok(()) };
                let had_trouble = world.had_trouble(node) || world.is_short(node);
                if begun.is_ok() && !merging {
                    world.plays_origin(id, Some(token));
                } else if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    oracle.abandon(token);
                }
                match begun {
                    Ok(()) | Err(MergeSetupError::Transient) => Ok(()),
                    Err(MergeSetupError::Other) if world.has_merge(origin) || world.is_half(origin) => Ok(()),
                    Err(MergeSetupError::NotInTime(_)) if world.has_hung() => Ok(()),
                    Err(MergeSetupError::Invalid | MergeSetupError::Mark(_)) if had_trouble => {
                        if let Some(Kind::Cow(cow)) = world.nodes.get_mut(&id).map(|node| &mut node.kind) {
                            cow.maybe_marked = true;
                        }
                        Ok(())
                    }
                    Err(error) => wrong(format!("a merge did not begin: {error}")),
                }
            })
        })
    }

    /// From now on the origin shows what this snapshot shows, and they are one.
    pub(super) fn plays_origin(&mut self, id: NodeId, token: Option<ReadToken>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let (own, disks, families) = (node.oracle, node.disks.clone(), node.families.clone());
        let Kind::Cow(cow) = &mut node.kind else { return };
        cow.merging = true;
        let origin = cow.origin;
        let Some(origin) = self.nodes.get_mut(&origin) else { return };
        origin.disks.extend(disks);
        origin.families.extend(families);
        let below = origin.oracle;
        let Some(shown) = self.oracles.get(&own).cloned() else { return };
        if let Some(oracle) = self.oracles.get_mut(&below) {
            let token = token.unwrap_or_else(|| oracle.begin_read());
            // What an origin has grown by is no affair of the snapshot.
            oracle.turn_head_into(token, shown.size(), &shown, false);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.oracle = below;
        }
        self.sweep();
    }

    /// Waits for the end of a merge, which is brought about where `stop` says so.
    pub(super) fn end_merge(&mut self, id: NodeId, stop: bool) -> Option<Act> {
        let Kind::Cow(cow) = &self.nodes[&id].kind else { return None };
        let (snapshot, merging) = (cow.snapshot.clone(), cow.merging);
        act(move || {
            if stop {
                snapshot.stop_merge();
            }
            let status = snapshot.wait_merge();
            finish(move |world| {
                let Some(node) = world.nodes.get(&id) else { return Ok(()) };
                let had_trouble = world.had_trouble(node) || world.is_short(node);
                world.count(match status {
                    MergeStatus::Finished => "merges that finished",
                    MergeStatus::Failed(_) => "merges that failed",
                    _ => "merges that stopped",
                });
                match status {
                    MergeStatus::Failed(failure) if !had_trouble => {
                        wrong(format!("a merge failed without a cause: {failure}"))
                    }
                    MergeStatus::None if merging => wrong("a merge that began is none"),
                    MergeStatus::Running => wrong("a merge that was waited for is still running"),
                    _ => Ok(()),
                }
            })
        })
    }
}

fn kind_name(config: &cow::Config) -> String {
    let chunk = config.chunk_bytes.unwrap_or(0) >> 10;
    format!("{}, {chunk} KiB", config.kind)
}
