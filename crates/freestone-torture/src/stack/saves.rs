//! Saves devices to a file while they serve requests, and restores them as new devices.

use freestone::device::{Device, Error};
use freestone::ram::{Ram, SetupError};
use freestone::save::{self, Base, BaseCheck, RestoreError, SaveError};

use super::{Below, Finding, Kind, NODES_MAX, NodeId, VerbTask, World, act, finding, finish, pick};
use crate::oracle::{Durability, ReadToken};
use crate::rt::sync::Arc;

/// A device being saved, with the state needed to judge the restored one.
struct SavedNode {
    from: NodeId,
    name: String,
    ram: Ram,
    oracle: u32,
    token: ReadToken,
    below: Option<Below>,
}

impl World {
    /// Returns the nodes that can be saved: RAM disks, forks and snapshots.
    pub(super) fn savable(&self) -> Vec<NodeId> {
        let mut all = self.ram_origins();
        all.extend(self.ram_snapshots());
        all.sort_unstable();
        all
    }

    /// Saves these nodes as of one moment, and restores them into a family. `whole`: see
    /// [`Op::Save`](crate::ops::Op::Save).
    pub(super) fn save(&mut self, nodes: &[NodeId], family: u16, whole: bool) -> Option<VerbTask> {
        let all: Vec<usize> = (0..self.families.len()).collect();
        let into = pick(&all, family)?;
        let room = NODES_MAX.saturating_sub(self.nodes.len());
        let path = self.new_path("saved")?;
        let family = self.families[into].family.clone();
        let mut saved_nodes = Vec::new();
        for &from in nodes.iter().take(room) {
            let node = &self.nodes[&from];
            let Kind::Ram(ram) = &node.kind else { continue };
            let (ram, below, oracle) = (ram.ram.clone(), ram.below.clone(), node.oracle);
            let token = self.oracles.get_mut(&oracle)?.begin_read();
            saved_nodes.push(SavedNode { from, name: format!("n{from}"), ram, oracle, token, below });
        }
        let before: Vec<_> = saved_nodes.iter().map(|one| self.before(&self.nodes[&one.from])).collect();
        let bases = saved_nodes
            .iter()
            .filter_map(|one| Some(Base::Device(Arc::clone(one.below.as_ref()?.device.as_ref()?))));
        let bases: Vec<Base> = bases.collect();
        let check = if whole { BaseCheck::Whole } else { BaseCheck::Sampled };
        act(move || {
            let devices: Vec<(&str, &Ram)> = saved_nodes.iter().map(|one| (&*one.name, &one.ram)).collect();
            let saved = save::save(&devices, &path, check, &mut |_, _| {});
            let restored = saved.map(|_| save::restore(&path, &family, &bases, &mut |_, _| {}));
            drop((family, bases));
            finish(move |world| {
                world.count("saves");
                // The restore has ended, so the file is no longer needed. An error only leaves it
                // in the run's directory.
                let _ = std::fs::remove_file(&path);
                let causes: Vec<(NodeId, _)> = saved_nodes.iter().map(|one| one.from).zip(before).collect();
                let failed = |world: &World, error| {
                    causes.iter().any(|&(from, before)| world.judge_query(from, error, before).is_ok())
                };
                let limited = world.families[into].limited;
                let restored = match restored {
                    Ok(Ok(restored)) => Ok(restored),
                    Err(SaveError::Setup { error: SetupError::NotInTime(_), .. }) if world.has_hung() => {
                        Err(None)
                    }
                    Err(SaveError::Page { error, .. } | SaveError::Base { error, .. })
                    | Ok(Err(RestoreError::Base(error)))
                        if failed(world, error) =>
                    {
                        Err(None)
                    }
                    Err(error) => Err(Some(format!("a save failed without a cause: {error}"))),
                    Ok(Err(RestoreError::Store { error: Error::NoSpace, .. })) if limited => Err(None),
                    Ok(Err(error)) => Err(Some(format!("a restore failed without a cause: {error}"))),
                };
                match restored {
                    Ok(restored) => world.add_restored(saved_nodes, restored, into),
                    Err(message) => {
                        for one in saved_nodes {
                            world.abandon(one.oracle, one.token);
                        }
                        message.map_or(Ok(()), finding)
                    }
                }
            })
        })
    }

    fn add_restored(
        &mut self,
        saved_nodes: Vec<SavedNode>,
        mut restored: Vec<(String, Ram)>,
        into: usize,
    ) -> Result<(), Finding> {
        for SavedNode { from, name, ram, oracle, token, below } in saved_nodes {
            let Some(at) = restored.iter().position(|(other, _)| *other == name) else {
                return finding(format!("{} was saved but not restored", self.name(from)));
            };
            let (_, restored_ram) = restored.swap_remove(at);
            let (was, is) = (ram.geometry().size, restored_ram.geometry().size);
            if ram.is_snapshot() != restored_ram.is_snapshot() || ram.is_snapshot() && was != is {
                return finding(format!(
                    "{} of {was} bytes was restored with another kind or size ({is} bytes)",
                    self.name(from)
                ));
            }
            drop(ram);
            let Some(oracle) = self.oracles.get_mut(&oracle) else { continue };
            let shown = oracle.snapshot_since(token, "restored", Durability::Nothing);
            let has_base = below.as_ref().is_some_and(|below| below.device.is_some());
            let made = self.add_ram("restored", restored_ram, into, Some(shown), below);
            if has_base {
                self.inherit(made, from);
            }
        }
        if restored.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = restored.iter().map(|(name, _)| &**name).collect();
        finding(format!("restored but never saved: {}", names.join(", ")))
    }
}
