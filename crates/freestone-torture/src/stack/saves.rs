//! Saved files: devices are saved beside their requests, and restored as new ones.

use freestone::device::{Device, Error};
use freestone::ram::{Ram, SetupError};
use freestone::save::{self, Base, BaseCheck, RestoreError, SaveError};

use super::{Act, Below, Kind, NODES_MAX, NodeId, World, Wrong, act, finish, pick, wrong};
use crate::oracle::{Durability, ReadToken};
use crate::rt::sync::Arc;

/// A device that is saved.
struct Saving {
    from: NodeId,
    name: String,
    ram: Ram,
    oracle: u32,
    token: ReadToken,
    below: Option<Below>,
}

impl World {
    /// What can be saved.
    pub(super) fn savable(&self) -> Vec<NodeId> {
        let mut all = self.ram_origins();
        all.extend(self.ram_snapshots());
        all.sort_unstable();
        all
    }

    /// Saves all of these at one moment, and restores them into a family.
    pub(super) fn save(&mut self, nodes: &[NodeId], family: u16, whole: bool) -> Option<Act> {
        let all: Vec<usize> = (0..self.families.len()).collect();
        let into = pick(&all, family)?;
        let room = NODES_MAX.saturating_sub(self.nodes.len());
        let path = self.new_path("saved")?;
        let family = self.families[into].family.clone();
        let mut saving = Vec::new();
        for &from in nodes.iter().take(room) {
            let node = &self.nodes[&from];
            let Kind::Ram(ram) = &node.kind else { continue };
            let (ram, below, oracle) = (ram.ram.clone(), ram.below.clone(), node.oracle);
            let token = self.oracles.get_mut(&oracle)?.begin_read();
            saving.push(Saving { from, name: format!("n{from}"), ram, oracle, token, below });
        }
        let before: Vec<_> = saving.iter().map(|one| self.before(&self.nodes[&one.from])).collect();
        let bases = saving
            .iter()
            .filter_map(|one| Some(Base::Device(Arc::clone(one.below.as_ref()?.device.as_ref()?))));
        let bases: Vec<Base> = bases.collect();
        let check = if whole { BaseCheck::Whole } else { BaseCheck::Sampled };
        act(move || {
            let devices: Vec<(&str, &Ram)> = saving.iter().map(|one| (&*one.name, &one.ram)).collect();
            let saved = save::save(&devices, &path, check, &mut |_, _| {});
            let restored = saved.map(|_| save::restore(&path, &family, &bases, &mut |_, _| {}));
            drop((family, bases));
            finish(move |world| {
                world.count("saves");
                // The whole file was read: nobody needs it any more.
                let _ = std::fs::remove_file(&path);
                let causes: Vec<(NodeId, _)> = saving.iter().map(|one| one.from).zip(before).collect();
                let failed = |world: &World, error| {
                    causes.iter().any(|&(from, before)| world.judge_look(from, error, before).is_ok())
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
                    Ok(restored) => world.are_restored(saving, restored, into),
                    Err(said) => {
                        for one in saving {
                            world.abandon(one.oracle, one.token);
                        }
                        said.map_or(Ok(()), wrong)
                    }
                }
            })
        })
    }

    fn are_restored(
        &mut self,
        saving: Vec<Saving>,
        mut restored: Vec<(String, Ram)>,
        into: usize,
    ) -> Result<(), Wrong> {
        for Saving { from, name, ram, oracle, token, below } in saving {
            let Some(at) = restored.iter().position(|(other, _)| *other == name) else {
                return wrong(format!("{} was saved, and not restored", self.name(from)));
            };
            let (_, again) = restored.swap_remove(at);
            let (was, is) = (ram.geometry().size, again.geometry().size);
            if ram.is_snapshot() != again.is_snapshot() || ram.is_snapshot() && was != is {
                return wrong(format!("{} of {was} bytes was restored as another of {is}", self.name(from)));
            }
            drop(ram);
            let Some(oracle) = self.oracles.get_mut(&oracle) else { continue };
            let shown = oracle.snapshot_since(token, "restored", Durability::Nothing);
            let has_base = below.as_ref().is_some_and(|below| below.device.is_some());
            let made = self.add_ram("restored", again, into, Some(shown), below);
            if has_base {
                self.inherit(made, from);
            }
        }
        if restored.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = restored.iter().map(|(name, _)| &**name).collect();
        wrong(format!("restored, and never saved: {}", names.join(", ")))
    }
}
