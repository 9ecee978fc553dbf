//! Takes snapshots of several devices at one moment: RAM disks, forks, and origins with COW
//! devices.
//!
//! Each snapshot shows its device at a moment within the verb. The content shown proves that the
//! moment is the same for all. Suppose that a write had completed before a second one started, on
//! any devices of the set. If the snapshots have the second write, they must have the first one as
//! well.

use freestone::consistency_group::{self, GroupMember};
use freestone::cow::{self, Snapshot};
use freestone::device::Result as Answer;
use freestone::ram::{Ram, SetupError};

use super::cow::PreparedCow;
use super::queries::read_all;
use super::{Finding, Kind, NodeId, OracleId, VerbTask, World, act, finding, finish};
use crate::ops::CowOp;
use crate::oracle::{Durability, ReadToken};

/// A RAM disk or fork of the set of which snapshots are taken.
struct Member {
    id: NodeId,
    ram: Ram,
    family: usize,
    oracle: OracleId,
    token: ReadToken,
}

/// A snapshot, and the content read from it if it was read.
struct TakenSnapshot<T> {
    snapshot: T,
    content: Option<Answer<Vec<u8>>>,
}

enum SnapshotFailure {
    Ram(SetupError),
    Cow(usize, cow::SetupError),
    TimedOut,
}

type SnapshotSet = (Vec<TakenSnapshot<Ram>>, Vec<TakenSnapshot<Snapshot>>);

impl World {
    /// Takes snapshots of all these devices at one moment. Each origin has its own settings.
    pub(super) fn snapshots(&mut self, rams: &[NodeId], origins: &[(NodeId, CowOp)]) -> Option<VerbTask> {
        let all: Vec<NodeId> =
            rams.iter().copied().chain(origins.iter().map(|(origin, _)| *origin)).collect();
        let mut members = Vec::new();
        for &id in rams {
            let Kind::Ram(node) = &self.nodes.get(&id)?.kind else { continue };
            let (ram, family, oracle) = (node.ram.clone(), node.family, self.nodes[&id].oracle);
            let token = self.oracles.get_mut(&oracle)?.begin_read();
            members.push(Member { id, ram, family, oracle, token });
        }
        // Prepare origins from top to bottom: if one lies on another, the upper one comes first.
        let mut origins = origins.to_vec();
        origins.sort_by_key(|(id, _)| std::cmp::Reverse(self.below(*id).len()));
        let all_prepared: Vec<PreparedCow> =
            origins.iter().filter_map(|(id, op)| self.prepare_cow(*id, *op, &all)).collect();
        let reads_content = all.len() > 1 || self.writes.is_multiple_of(4);
        act(move || {
            let taken = take(&members, &all_prepared, reads_content);
            finish(move |world| {
                world.count(if all_prepared.is_empty() { "snapshots" } else { "snapshots with a store" });
                if members.len() + all_prepared.len() > 1 {
                    world.count("sets of snapshots");
                }
                match taken {
                    Ok(taken) => world.add_snapshots(members, all_prepared, taken),
                    Err(failed) => world.judge_snapshot_failure(members, all_prepared, &failed),
                }
            })
        })
    }

    fn add_snapshots(
        &mut self,
        members: Vec<Member>,
        all_prepared: Vec<PreparedCow>,
        taken: SnapshotSet,
    ) -> Result<(), Finding> {
        let (rams, snapshots) = taken;
        let of_rams = members.iter().zip(&rams).map(|(one, taken)| (one.oracle, &one.token, &taken.content));
        let of_cows =
            all_prepared.iter().zip(&snapshots).map(|(one, taken)| (one.oracle, &one.token, &taken.content));
        let contents: Vec<_> = of_rams
            .chain(of_cows)
            .filter_map(|(oracle, token, content)| {
                Some((self.oracles.get(&oracle)?, token, content.as_ref()?.as_ref().ok()?))
            })
            .collect();
        let moment = contents.iter().map(|(oracle, token, bytes)| oracle.latest(token, bytes)).max();
        for (oracle, token, bytes) in &contents {
            oracle.check_moment(token, moment.unwrap_or(0), bytes)?;
        }
        for (Member { id, ram, family, oracle, token }, TakenSnapshot { snapshot, .. }) in
            members.into_iter().zip(rams)
        {
            drop(ram);
            let below = self.below_ram(id);
            let Some(oracle) = self.oracles.get_mut(&oracle) else { continue };
            let shown = oracle.snapshot_since(token, "snapshot", Durability::Nothing);
            let made = self.add_ram("snapshot", snapshot, family, Some(shown), below);
            self.inherit(made, id);
        }
        for (prepared, TakenSnapshot { snapshot, .. }) in all_prepared.into_iter().zip(snapshots) {
            self.add_cow(prepared, snapshot);
        }
        Ok(())
    }

    fn judge_snapshot_failure(
        &mut self,
        members: Vec<Member>,
        all_prepared: Vec<PreparedCow>,
        failed: &SnapshotFailure,
    ) -> Result<(), Finding> {
        let judged = match failed {
            SnapshotFailure::Ram(SetupError::NotInTime(_)) | SnapshotFailure::TimedOut if self.has_hung() => {
                Ok(())
            }
            SnapshotFailure::Ram(error) => finding(format!("a snapshot could not be taken: {error}")),
            SnapshotFailure::TimedOut => finding("snapshots could not be taken in time"),
            SnapshotFailure::Cow(at, error) => self.judge_cow(&all_prepared[*at], error),
        };
        for Member { oracle, token, .. } in members {
            self.abandon(oracle, token);
        }
        for prepared in all_prepared {
            self.discard_prepared(prepared);
        }
        judged
    }
}

fn take(
    members: &[Member],
    all_prepared: &[PreparedCow],
    reads_content: bool,
) -> Result<SnapshotSet, SnapshotFailure> {
    let cows = all_prepared.iter().enumerate();
    let cows = cows.map(|(at, prepared)| prepared.prepare().map_err(|error| SnapshotFailure::Cow(at, error)));
    let mut cows = cows.collect::<Result<Vec<_>, _>>()?;
    let rams = members.iter().map(|one| one.ram.prepare_snapshot().map_err(SnapshotFailure::Ram));
    let mut rams = rams.collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<&mut dyn GroupMember> = cows.iter_mut().map(|one| one as _).collect();
    all.extend(rams.iter_mut().map(|one| one as &mut dyn GroupMember));
    consistency_group::take_snapshots(&mut all).map_err(|_| SnapshotFailure::TimedOut)?;
    let rams = rams.into_iter().map(|one| {
        let snapshot = one.into_snapshot();
        let content = reads_content.then(|| read_all(&snapshot));
        TakenSnapshot { snapshot, content }
    });
    let cows = cows.into_iter().map(|one| {
        let snapshot = one.into_snapshot();
        let content = reads_content.then(|| read_all(&snapshot));
        TakenSnapshot { snapshot, content }
    });
    Ok((rams.collect(), cows.collect()))
}
