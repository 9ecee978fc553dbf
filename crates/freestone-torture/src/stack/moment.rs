//! Snapshots of several devices at one moment: of RAM disks and forks, and of origins with stores.
//!
//! Each shows a moment of its device that lies within the verb. That it is the same moment for all
//! of them is judged by what they show: where one has a write that began after another was
//! answered, that other one is in the snapshots, too, on whatever device of the set it was.

use freestone::consistency_group::{self, Pending};
use freestone::cow::{self, Snapshot};
use freestone::device::Result as Answer;
use freestone::ram::{Ram, SetupError};

use super::cow::Making;
use super::look::read_all;
use super::{Act, Kind, NodeId, OracleId, World, Wrong, act, finish, wrong};
use crate::ops::CowOp;
use crate::oracle::{Durability, ReadToken};

/// A RAM disk or fork of the set.
struct Member {
    id: NodeId,
    ram: Ram,
    family: usize,
    oracle: OracleId,
    token: ReadToken,
}

/// What was taken, and what it shows where that was looked at.
struct Taken<T> {
    snapshot: T,
    shows: Option<Answer<Vec<u8>>>,
}

/// Why there are no snapshots.
enum Failed {
    Ram(SetupError),
    Cow(usize, cow::SetupError),
    Late,
}

type Set = (Vec<Taken<Ram>>, Vec<Taken<Snapshot>>);

impl World {
    /// Of all of these; each origin has its own op.
    pub(super) fn snapshots(&mut self, rams: &[NodeId], origins: &[(NodeId, CowOp)]) -> Option<Act> {
        let all: Vec<NodeId> =
            rams.iter().copied().chain(origins.iter().map(|(origin, _)| *origin)).collect();
        let mut members = Vec::new();
        for &id in rams {
            let Kind::Ram(node) = &self.nodes.get(&id)?.kind else { continue };
            let (ram, family, oracle) = (node.ram.clone(), node.family, self.nodes[&id].oracle);
            let token = self.oracles.get_mut(&oracle)?.begin_read();
            members.push(Member { id, ram, family, oracle, token });
        }
        // Of two of which one lies on the other the upper one comes first.
        let mut origins = origins.to_vec();
        origins.sort_by_key(|(id, _)| std::cmp::Reverse(self.below(*id).len()));
        let makings: Vec<Making> =
            origins.iter().filter_map(|(id, op)| self.prepare_cow(*id, *op, &all)).collect();
        let looks = all.len() > 1 || self.writes.is_multiple_of(4);
        act(move || {
            let taken = take(&members, &makings, looks);
            finish(move |world| {
                world.count(if makings.is_empty() { "snapshots" } else { "snapshots with a store" });
                if members.len() + makings.len() > 1 {
                    world.count("sets of snapshots");
                }
                match taken {
                    Ok(taken) => world.are_taken(members, makings, taken),
                    Err(failed) => world.are_not_taken(members, makings, &failed),
                }
            })
        })
    }

    fn are_taken(&mut self, members: Vec<Member>, makings: Vec<Making>, taken: Set) -> Result<(), Wrong> {
        let (rams, snapshots) = taken;
        let of_rams = members.iter().zip(&rams).map(|(one, taken)| (one.oracle, &one.token, &taken.shows));
        let of_cows =
            makings.iter().zip(&snapshots).map(|(one, taken)| (one.oracle, &one.token, &taken.shows));
        let looked: Vec<_> = of_rams
            .chain(of_cows)
            .filter_map(|(oracle, token, shows)| {
                Some((self.oracles.get(&oracle)?, token, shows.as_ref()?.as_ref().ok()?))
            })
            .collect();
        let moment = looked.iter().map(|(oracle, token, bytes)| oracle.latest(token, bytes)).max();
        for (oracle, token, bytes) in &looked {
            oracle.check_moment(token, moment.unwrap_or(0), bytes)?;
        }
        for (Member { id, ram, family, oracle, token }, Taken { snapshot, .. }) in
            members.into_iter().zip(rams)
        {
            drop(ram);
            let below = self.below_ram(id);
            let Some(oracle) = self.oracles.get_mut(&oracle) else { continue };
            let shown = oracle.snapshot_since(token, "snapshot", Durability::Nothing);
            let made = self.add_ram("snapshot", snapshot, family, Some(shown), below);
            self.inherit(made, id);
        }
        for (making, Taken { snapshot, .. }) in makings.into_iter().zip(snapshots) {
            self.add_cow(making, snapshot);
        }
        Ok(())
    }

    fn are_not_taken(
        &mut self,
        members: Vec<Member>,
        makings: Vec<Making>,
        failed: &Failed,
    ) -> Result<(), Wrong> {
        let judged = match failed {
            Failed::Ram(SetupError::NotInTime(_)) | Failed::Late if self.has_hung() => Ok(()),
            Failed::Ram(error) => wrong(format!("a snapshot could not be taken: {error}")),
            Failed::Late => wrong("snapshots could not be taken in time"),
            Failed::Cow(at, error) => self.judge_cow(&makings[*at], error),
        };
        for Member { oracle, token, .. } in members {
            self.abandon(oracle, token);
        }
        for making in makings {
            self.give_up(making);
        }
        judged
    }
}

fn take(members: &[Member], makings: &[Making], looks: bool) -> Result<Set, Failed> {
    let cows = makings.iter().enumerate();
    let cows = cows.map(|(at, making)| making.prepare().map_err(|error| Failed::Cow(at, error)));
    let mut cows = cows.collect::<Result<Vec<_>, _>>()?;
    let rams = members.iter().map(|one| one.ram.prepare_snapshot().map_err(Failed::Ram));
    let mut rams = rams.collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<&mut dyn Pending> = cows.iter_mut().map(|one| one as _).collect();
    all.extend(rams.iter_mut().map(|one| one as &mut dyn Pending));
    consistency_group::take(&mut all).map_err(|_| Failed::Late)?;
    let rams = rams.into_iter().map(|one| {
        let snapshot = one.into_snapshot();
        let shows = looks.then(|| read_all(&snapshot));
        Taken { snapshot, shows }
    });
    let cows = cows.into_iter().map(|one| {
        let snapshot = one.into_snapshot();
        let shows = looks.then(|| read_all(&snapshot));
        Taken { snapshot, shows }
    });
    Ok((rams.collect(), cows.collect()))
}
