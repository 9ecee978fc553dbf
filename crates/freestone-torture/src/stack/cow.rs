//! Snapshots with COW devices, and merges.

use freestone::cow::{self, MergeSetupError, MergeStatus, Origin, SetupError, Snapshot, StoreKind};
use freestone::device::{Blocking, Device, Flags};

use super::{Causes, CowNode, Finding, Kind, NodeId, OracleId, VerbTask, World, act, finding, finish, pick};
use crate::disk::{DiskConfig, SimDisk};
use crate::ops::CowOp;
use crate::oracle::{Durability, ReadToken};
use crate::rt::sync::Arc;

/// Bytes at the start of a device that are zeroed so that the device looks like a new COW device.
const HEADER_BYTES: u64 = 4096;

pub(super) struct PreparedCow {
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

impl PreparedCow {
    /// Zeroes the header of the COW device and prepares the snapshot. Waits for the COW device.
    pub fn prepare(&self) -> Result<cow::PendingSnapshot, SetupError> {
        let blank = self.device.write_zeroes(0, HEADER_BYTES, Flags::FUA);
        blank.map_err(|source| SetupError::Device { what: "blanking", source })?;
        self.origin.prepare_snapshot(Arc::clone(&self.device), &self.config)
    }
}

impl World {
    /// Returns the origins of which a snapshot can be taken.
    pub(super) fn origins(&self) -> Vec<NodeId> {
        let mut all = self.nodes_that(|node| matches!(&node.kind, Kind::Origin(origin) if !origin.is_half));
        all.retain(|&id| self.is_content_visible(id));
        all
    }

    pub(super) fn cow_snapshots(&self) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(node.kind, Kind::Cow(_)))
    }

    /// Prepares a snapshot of an origin and chooses its COW device, which must not lie on any node
    /// of `set`. Returns `None` if the origin is gone.
    pub(super) fn prepare_cow(&mut self, id: NodeId, op: CowOp, set: &[NodeId]) -> Option<PreparedCow> {
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
        // Prefer a device of the stack as the COW device, if one is free and large enough.
        let mut free = self.coverable();
        free.retain(|&other| {
            self.can_hold(other, id, wanted) && !self.below(other).iter().any(|below| set.contains(below))
        });
        let cow = on.and_then(|number| pick(&free, number)).filter(|other| self.is_idle(*other));
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
        Some(PreparedCow { id, cow, ample, config, durability, device, origin, oracle, token, before })
    }

    pub(super) fn add_cow(&mut self, prepared: PreparedCow, snapshot: Snapshot) {
        let PreparedCow { id, cow, ample, config, durability, oracle, token, .. } = prepared;
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

    /// Checks that a failure to prepare a snapshot has a cause.
    pub(super) fn judge_cow(&self, prepared: &PreparedCow, error: &SetupError) -> Result<(), Finding> {
        let &PreparedCow { id, cow, before, .. } = prepared;
        let now = self.causes(&self.cow_disks(id, cow));
        let causes = now != before || now.hung > 0;
        let nodes = || [id, cow].into_iter().filter_map(|id| self.nodes.get(&id));
        let limited = nodes().any(|node| self.is_limited(node));
        // A snapshot below the origin or the COW device may have been lost before.
        let worse_off = nodes()
            .any(|node| self.can_be_damaged(node) && (self.may_be_damaged(node) || self.may_overflow(node)));
        match error {
            SetupError::Merging if self.has_merge(id) => Ok(()),
            SetupError::FreezeTimeout(_) if self.has_hung() => Ok(()),
            SetupError::Device { .. } if causes || limited || worse_off => Ok(()),
            SetupError::TooSmall { .. } | SetupError::OddSize { .. } | SetupError::Block { .. } => Ok(()),
            error => finding(format!("a snapshot could not be made: {error}")),
        }
    }

    /// Cleans up after a failed snapshot: removes the COW device and the nodes below it.
    pub(super) fn discard_prepared(&mut self, prepared: PreparedCow) {
        self.abandon(prepared.oracle, prepared.token);
        let mut gone = Vec::new();
        // The nodes below the COW device have the same content, which may include parts of
        // exceptions and is not judged.
        for id in self.below(prepared.cow) {
            self.remove_node(id, &mut gone);
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

    /// Returns true if `cow` is large enough and can be the COW device of `origin`: neither node
    /// lies on the other.
    fn can_hold(&self, cow: NodeId, origin: NodeId, bytes: u64) -> bool {
        let node = &self.nodes[&cow];
        let is_plain =
            matches!(node.kind, Kind::Ram(_) | Kind::Disk(_) | Kind::Memory | Kind::File(_) | Kind::Layer);
        is_plain
            && node.device.geometry().size >= bytes
            && !self.below(origin).contains(&cow)
            && !self.below(cow).contains(&origin)
    }

    /// Returns a node and all nodes below it, the node first.
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

    /// Returns true if this origin lies directly on a simulated disk, which can be opened again
    /// after a crash.
    pub(super) fn lies_on_disk(&self, id: NodeId) -> bool {
        let below = self.nodes.get(&id).and_then(|node| self.nodes.get(node.on.first()?));
        below.is_some_and(|below| matches!(below.kind, Kind::Disk(_)))
    }

    pub(super) fn merge(&mut self, id: NodeId) -> Option<VerbTask> {
        let (node, Kind::Cow(cow)) = (&self.nodes[&id], &self.nodes[&id].kind) else { return None };
        let (snapshot, origin, merging) = (cow.snapshot.clone(), cow.origin, cow.merging);
        let is_covered = node.covered;
        // Do not merge then: a cover of the snapshot would have to share its oracle with the covers
        // of the origin.
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
                let may_be_damaged = world.may_be_damaged(node) || world.may_overflow(node);
                if begun.is_ok() && !merging {
                    world.record_merge(id, Some(token));
                } else if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    oracle.abandon(token);
                }
                match begun {
                    Ok(()) | Err(MergeSetupError::Transient) => Ok(()),
                    Err(MergeSetupError::OtherMerge) if world.has_merge(origin) || world.is_half(origin) => {
                        Ok(())
                    }
                    Err(MergeSetupError::FreezeTimeout(_)) if world.has_hung() => Ok(()),
                    Err(MergeSetupError::Invalid | MergeSetupError::Mark(_)) if may_be_damaged => {
                        if let Some(Kind::Cow(cow)) = world.nodes.get_mut(&id).map(|node| &mut node.kind) {
                            cow.maybe_marked = true;
                        }
                        Ok(())
                    }
                    Err(error) => finding(format!("a merge did not begin: {error}")),
                }
            })
        })
    }

    /// Records the start of a merge: from now on the origin shows the content of this snapshot.
    pub(super) fn record_merge(&mut self, id: NodeId, token: Option<ReadToken>) {
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
            // The snapshot does not have the part by which the origin has grown since.
            oracle.replace_head(token, shown.size(), &shown, false);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.oracle = below;
        }
        self.sweep();
    }

    /// Waits for the end of a merge. If `stop` is set, stops the merge first.
    pub(super) fn end_merge(&mut self, id: NodeId, stop: bool) -> Option<VerbTask> {
        let Kind::Cow(cow) = &self.nodes[&id].kind else { return None };
        let (snapshot, merging) = (cow.snapshot.clone(), cow.merging);
        act(move || {
            if stop {
                snapshot.stop_merge();
            }
            let status = snapshot.wait_merge();
            finish(move |world| {
                let Some(node) = world.nodes.get(&id) else { return Ok(()) };
                let may_be_damaged = world.may_be_damaged(node) || world.may_overflow(node);
                world.count(match status {
                    MergeStatus::Finished => "merges that finished",
                    MergeStatus::Failed(_) => "merges that failed",
                    _ => "merges that stopped",
                });
                match status {
                    MergeStatus::Failed(failure) if !may_be_damaged => {
                        finding(format!("a merge failed without a cause: {failure}"))
                    }
                    MergeStatus::None if merging => finding("a merge was started, but its status is none"),
                    MergeStatus::Running => finding("a merge is still running after its end was waited for"),
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
