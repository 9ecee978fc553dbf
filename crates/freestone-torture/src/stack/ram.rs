//! Verbs of RAM disks, forks and snapshots.

use freestone::device::Device;
use freestone::moment::{self, Pending};
use freestone::ram::{
    ForkConfig, Idle, Ram, Recompress, RecompressError, RecompressKind, SetupError, Writeback, WritebackError,
};

use super::{Act, Kind, Node, NodeId, RamNode, World, act, finish, pick, wrong};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

impl World {
    fn ram_nodes(&self, is: impl Fn(&Node, &RamNode) -> bool) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(&node.kind, Kind::Ram(ram) if is(node, ram)))
    }

    /// All of them.
    pub(super) fn rams(&self) -> Vec<NodeId> {
        self.ram_nodes(|_, _| true)
    }

    /// Disks and forks that nothing covers.
    pub(super) fn ram_live(&self) -> Vec<NodeId> {
        self.ram_nodes(|node, ram| !node.covered && !ram.ram.is_snapshot())
    }

    pub(super) fn ram_snapshots(&self) -> Vec<NodeId> {
        self.ram_nodes(|_, ram| ram.ram.is_snapshot())
    }

    /// Disks and forks that show what their oracle says: nothing covers them, or layers that keep
    /// nothing back.
    pub(super) fn ram_origins(&self) -> Vec<NodeId> {
        let mut all = self.ram_nodes(|_, ram| !ram.ram.is_snapshot());
        all.retain(|&id| self.is_shown(id));
        all
    }

    /// Those whose size may change under what covers them.
    pub(super) fn ram_growing(&self) -> Vec<NodeId> {
        self.ram_origins()
    }

    /// Whether what covers a node hands on everything at once.
    pub(super) fn is_shown(&self, id: NodeId) -> bool {
        let covers = self.nodes.iter().filter(|(_, node)| node.on.contains(&id));
        covers.into_iter().all(|(&over, node)| match &node.kind {
            Kind::Layer => self.is_shown(over),
            Kind::Origin(origin) => {
                !origin.is_half && !self.has_merge(over) && !self.held.contains(&over) && self.is_shown(over)
            }
            Kind::Cow(cow) => cow.origin == id,
            _ => false,
        })
    }

    /// Whether a snapshot of this origin plays its part.
    pub(super) fn has_merge(&self, origin: NodeId) -> bool {
        self.nodes
            .values()
            .any(|node| matches!(&node.kind, Kind::Cow(cow) if cow.origin == origin && cow.merging))
    }

    fn ram(&self, id: NodeId) -> Option<(Ram, usize)> {
        match &self.nodes.get(&id)?.kind {
            Kind::Ram(node) => Some((node.ram.clone(), node.family)),
            _ => None,
        }
    }

    /// Of several at one moment.
    pub(super) fn snapshot(&mut self, nodes: &[NodeId]) -> Option<Act> {
        let mut origins = Vec::new();
        for &id in nodes {
            let (ram, family) = self.ram(id)?;
            let oracle = self.nodes[&id].oracle;
            let token = self.oracles.get_mut(&oracle)?.begin_read();
            origins.push((id, ram, family, oracle, token));
        }
        act(move || {
            let taken = take(origins.iter().map(|(_, ram, ..)| ram));
            finish(move |world| {
                world.count("snapshots");
                let taken = match taken {
                    Ok(taken) => taken.into_iter().map(Some).collect(),
                    Err(SetupError::NotInTime(_)) if world.has_hung() => vec![None; origins.len()],
                    Err(error) => return wrong(format!("a snapshot could not be taken: {error}")),
                };
                for ((id, ram, family, oracle, token), taken) in origins.into_iter().zip(taken) {
                    drop(ram);
                    let Some(oracle) = world.oracles.get_mut(&oracle) else { continue };
                    let Some(taken) = taken else {
                        oracle.abandon(token);
                        continue;
                    };
                    let shown = oracle.snapshot_since(token, "snapshot", Durability::Nothing);
                    let made = world.add_ram("snapshot", taken, family, Some(shown), Vec::new());
                    world.inherit(made, id);
                }
                Ok(())
            })
        })
    }

    /// What a node was made from lies below it.
    fn inherit(&mut self, made: NodeId, from: NodeId) {
        let Some(from) = self.nodes.get(&from) else { return };
        let (disks, families) = (from.disks.clone(), from.families.clone());
        if let Some(made) = self.nodes.get_mut(&made) {
            made.disks.extend(disks);
            made.families.extend(families);
        }
    }

    /// Whether anything hung so far: what waits for writes may have given up.
    pub(super) fn has_hung(&self) -> bool {
        self.disks.values().any(|disk| disk.injected().hung > 0)
    }

    pub(super) fn fork(
        &mut self,
        id: NodeId,
        more_sectors: u32,
        cap_kib: u32,
        family: Option<u16>,
    ) -> Option<Act> {
        let (snapshot, own) = self.ram(id)?;
        let base = self.oracles.get(&self.nodes[&id].oracle)?.clone();
        let size = snapshot.geometry().size + u64::from(more_sectors) * SECTOR_BYTES as u64;
        let cap = u64::from(cap_kib) << 10;
        let config = ForkConfig { size: Some(size), mem_limit: cap, mem_min: 0 };
        let all: Vec<usize> = (0..self.families.len()).collect();
        let other = family.and_then(|number| pick(&all, number)).filter(|&other| other != own);
        let into = other.map(|other| self.families[other].family.clone());
        act(move || {
            let made = match &into {
                None => snapshot.fork(&config),
                Some(family) => family.fork(Arc::new(snapshot), &config),
            };
            finish(move |world| {
                world.count("forks");
                let made = match made {
                    Ok(made) => made,
                    Err(SetupError::TooDeep) => return Ok(()),
                    Err(error) => return wrong(format!("a fork could not be made: {error}")),
                };
                let fork = world.add_ram("fork", made, other.unwrap_or(own), Some(base), Vec::new());
                world.inherit(fork, id);
                if cap > 0
                    && let Some(family) = world.families.get_mut(other.unwrap_or(own))
                {
                    family.limited = true;
                }
                Ok(())
            })
        })
    }

    pub(super) fn rewind(&mut self, id: NodeId, reset: bool) -> Option<Act> {
        let (ram, _) = self.ram(id)?;
        let oracle = self.nodes[&id].oracle;
        let token = self.oracles.get_mut(&oracle)?.begin_read();
        act(move || {
            let done = if reset { ram.reset() } else { ram.rewind() };
            finish(move |world| {
                world.count("rewinds");
                let base = match world.nodes.get(&id).map(|node| &node.kind) {
                    Some(Kind::Ram(node)) => node.base.clone(),
                    _ => None,
                };
                if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    let zeroes = || Arc::new(Oracle::new("zeroes", oracle.size(), Durability::Nothing));
                    let base = base.unwrap_or_else(zeroes);
                    oracle.turn_into(token, &base, false);
                }
                done.or_else(|error| wrong(format!("a rewind failed: {error}")))
            })
        })
    }

    pub(super) fn grow(&mut self, id: NodeId, kib: u32) -> Option<Act> {
        let (ram, _) = self.ram(id)?;
        let size = (ram.geometry().size + (u64::from(kib) << 10)).min(16 << 20);
        act(move || {
            let grown = if size > ram.geometry().size { ram.grow(size) } else { Ok(()) };
            finish(move |world| {
                world.count("growths");
                let sectors = ram.geometry().size / SECTOR_BYTES as u64;
                if let Some(oracle) = world.nodes.get(&id).map(|node| node.oracle) {
                    world.oracles.get_mut(&oracle).into_iter().for_each(|oracle| oracle.grow(sectors));
                }
                grown.or_else(|error| wrong(format!("a device did not grow: {error}")))
            })
        })
    }

    pub(super) fn writeback(&mut self, id: NodeId, which: u8) -> Option<Act> {
        let (ram, family) = self.ram(id)?;
        let disks = self.nodes[&id].disks.clone();
        let before = self.causes(&disks);
        let pages = ram.geometry().size / 4096;
        if pages == 0 {
            return None;
        }
        let what = match which % 5 {
            0 => Writeback::Huge,
            1 => Writeback::HugeIdle,
            2 => Writeback::Incompressible,
            3 => Writeback::Pages(vec![0..=pages - 1]),
            _ => Writeback::Idle,
        };
        act(move || {
            ram.idle(Idle::All);
            let outcome = ram.writeback(&what);
            finish(move |world| {
                world.count("writebacks");
                let has_backing = world.families[family].backing.is_some();
                let now = world.causes(&disks);
                match outcome {
                    Err((_, WritebackError::NoBacking)) if !has_backing => Ok(()),
                    // How full it is when it says so depends on how pages pack.
                    Ok(_) | Err((_, WritebackError::NoSpace)) => Ok(()),
                    Err((_, WritebackError::Device(_))) if now != before || now.hung > 0 => Ok(()),
                    Err((_, error)) => wrong(format!("a writeback failed without a cause: {error}")),
                }
            })
        })
    }

    pub(super) fn recompress(&mut self, id: NodeId) -> Option<Act> {
        let (ram, family) = self.ram(id)?;
        act(move || {
            let kind = Some(RecompressKind::Huge).filter(|_| id.is_multiple_of(2));
            let outcome = ram.recompress(&Recompress { kind, ..Recompress::default() });
            finish(move |world| {
                world.count("recompressions");
                match outcome {
                    Ok(_) => Ok(()),
                    Err((_, RecompressError::NoSpace)) if world.families[family].limited => Ok(()),
                    Err((_, error)) => wrong(format!("a recompression failed: {error}")),
                }
            })
        })
    }

    pub(super) fn compact(&mut self, id: NodeId) -> Option<Act> {
        let (ram, _) = self.ram(id)?;
        act(move || {
            ram.compact();
            finish(|world| {
                world.count("compactions");
                Ok(())
            })
        })
    }

    pub(super) fn limit(&mut self, family: u16, kib: u32) -> Option<Act> {
        let all: Vec<usize> = (0..self.families.len()).collect();
        let at = pick(&all, family)?;
        let family = &mut self.families[at];
        family.limited |= kib > 0;
        family.family.set_mem_limit(u64::from(kib) << 10);
        self.count("limits");
        None
    }

    pub(super) fn own_limits(&mut self, id: NodeId, cap_kib: u32, least_kib: u32) -> Option<Act> {
        let (ram, family) = self.ram(id)?;
        let (cap, least) = (u64::from(cap_kib) << 10, u64::from(least_kib) << 10);
        // A guarantee to one is a limit for the others.
        self.families[family].limited |= cap > 0 || least > 0;
        act(move || {
            let set = ram.set_own_limits(cap, least);
            finish(move |world| {
                world.count("limits");
                match set {
                    Ok(()) | Err(SetupError::GuaranteeAboveCap { .. } | SetupError::Guarantee { .. }) => {
                        Ok(())
                    }
                    Err(error) => wrong(format!("limits could not be set: {error}")),
                }
            })
        })
    }
}

/// Snapshots of all of these at one moment.
fn take<'a>(origins: impl Iterator<Item = &'a Ram>) -> Result<Vec<Ram>, SetupError> {
    let mut pending = origins.map(Ram::prepare_snapshot).collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<&mut dyn Pending> = pending.iter_mut().map(|one| one as _).collect();
    moment::take(&mut all).map_err(|_| SetupError::NotInTime(moment::NotInTime))?;
    Ok(pending.into_iter().map(freestone::ram::PendingSnapshot::into_snapshot).collect())
}
