//! Ops on RAM disks, forks and snapshots.

use freestone::device::Device;
use freestone::ram::{
    IdleSelection, Ram, RecompressError, RecompressKind, RecompressOptions, SetupError, Writeback,
    WritebackError,
};

use super::{Below, Kind, Node, NodeId, RamNode, VerbTask, World, act, finding, finish};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

impl World {
    fn ram_nodes(&self, is: impl Fn(&Node, &RamNode) -> bool) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(&node.kind, Kind::Ram(ram) if is(node, ram)))
    }

    /// Returns all RAM disks, forks and snapshots.
    pub(super) fn rams(&self) -> Vec<NodeId> {
        self.ram_nodes(|_, _| true)
    }

    /// Returns the RAM disks and forks without a cover.
    pub(super) fn ram_live(&self) -> Vec<NodeId> {
        self.ram_nodes(|node, ram| !node.covered && !ram.ram.is_snapshot())
    }

    pub(super) fn ram_snapshots(&self) -> Vec<NodeId> {
        self.ram_nodes(|_, ram| ram.ram.is_snapshot())
    }

    /// Returns the RAM disks and forks whose content equals their oracle: without a cover, or under
    /// layers that hold no writes back.
    pub(super) fn ram_origins(&self) -> Vec<NodeId> {
        let mut all = self.ram_nodes(|_, ram| !ram.ram.is_snapshot());
        all.retain(|&id| self.is_content_visible(id));
        all
    }

    /// Returns the RAM disks and forks that may grow, even under their covers.
    pub(super) fn ram_growing(&self) -> Vec<NodeId> {
        self.ram_origins()
    }

    /// Returns true if all covers of a node pass every write through at once.
    pub(super) fn is_content_visible(&self, id: NodeId) -> bool {
        let covers = self.nodes.iter().filter(|(_, node)| node.on.contains(&id));
        covers.into_iter().all(|(&over, node)| match &node.kind {
            Kind::Layer => self.is_content_visible(over),
            Kind::Origin(origin) => {
                !origin.is_half
                    && !self.has_merge(over)
                    && !self.paused.contains(&over)
                    && self.is_content_visible(over)
            }
            Kind::Cow(cow) => cow.origin == id,
            _ => false,
        })
    }

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

    /// Returns the base of a RAM disk, fork or snapshot, or `None` if it has none.
    pub(super) fn below_ram(&self, id: NodeId) -> Option<Below> {
        match &self.nodes.get(&id)?.kind {
            Kind::Ram(node) => node.below.clone(),
            _ => None,
        }
    }

    /// Adds the sources of failures of the node `from` to those of `made`, which was made from it.
    pub(super) fn inherit(&mut self, made: NodeId, from: NodeId) {
        let Some(from) = self.nodes.get(&from) else { return };
        let (disks, families) = (from.disks.clone(), from.families.clone());
        if let Some(made) = self.nodes.get_mut(&made) {
            made.disks.extend(disks);
            made.families.extend(families);
        }
    }

    /// Returns true if any request has hung: ops that wait for writes may then have timed out.
    pub(super) fn has_hung(&self) -> bool {
        self.disks.values().any(|disk| disk.fault_counts().hung > 0)
            || self.injectors.values().any(|injector| injector.causes().hung > 0)
    }

    pub(super) fn rewind(&mut self, id: NodeId, reset: bool) -> Option<VerbTask> {
        let (ram, _) = self.ram(id)?;
        let oracle = self.nodes[&id].oracle;
        let below = self.below_ram(id).map(|below| below.shows);
        let shown = self.oracles.get_mut(&oracle)?;
        let base =
            below.unwrap_or_else(|| Arc::new(Oracle::new("zeroes", shown.size(), Durability::Nothing)));
        let token = shown.begin_replacement(&base);
        act(move || {
            let done = if reset { ram.reset() } else { ram.rewind() };
            finish(move |world| {
                world.count("rewinds");
                if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    oracle.replace_content(token, &base, false);
                }
                done.or_else(|error| finding(format!("a rewind failed: {error}")))
            })
        })
    }

    pub(super) fn grow(&mut self, id: NodeId, kib: u32) -> Option<VerbTask> {
        let (ram, _) = self.ram(id)?;
        let before = ram.geometry().size;
        let size = (before + (u64::from(kib) << 10)).min(16 << 20).max(before);
        // Grow the oracle first: requests may reach the new range before the verb ends.
        let oracle = self.nodes[&id].oracle;
        self.oracles.get_mut(&oracle)?.grow(size / SECTOR_BYTES as u64);
        act(move || {
            let grown = if size > before { ram.grow(size) } else { Ok(()) };
            finish(move |world| {
                world.count("growths");
                grown.or_else(|error| finding(format!("a device did not grow: {error}")))
            })
        })
    }

    pub(super) fn writeback(&mut self, id: NodeId, which: u8) -> Option<VerbTask> {
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
            ram.mark_idle(IdleSelection::All);
            let outcome = ram.writeback(&what);
            finish(move |world| {
                world.count("writebacks");
                let has_backing = world.families[family].backing.is_some();
                let now = world.causes(&disks);
                match outcome {
                    Err((_, WritebackError::NoBacking)) if !has_backing => Ok(()),
                    // How full the backing device can be depends on how pages pack, so any
                    // writeback may find no space.
                    Ok(_) | Err((_, WritebackError::NoSpace)) => Ok(()),
                    Err((_, WritebackError::Device(_))) if now != before || now.hung > 0 => Ok(()),
                    Err((_, error)) => finding(format!("a writeback failed without a cause: {error}")),
                }
            })
        })
    }

    pub(super) fn recompress(&mut self, id: NodeId) -> Option<VerbTask> {
        let (ram, family) = self.ram(id)?;
        act(move || {
            let kind = Some(RecompressKind::Huge).filter(|_| id.is_multiple_of(2));
            let (group, dedup) = (id.is_multiple_of(3), id % 3 == 1);
            let options = RecompressOptions { kind, group, dedup, ..RecompressOptions::default() };
            let outcome = ram.recompress(&options);
            finish(move |world| {
                world.count("recompressions");
                match outcome {
                    Ok(_) => Ok(()),
                    Err((_, RecompressError::NoSpace)) if world.families[family].limited => Ok(()),
                    Err((_, error)) => finding(format!("a recompression failed: {error}")),
                }
            })
        })
    }

    pub(super) fn compact(&mut self, id: NodeId) -> Option<VerbTask> {
        let (ram, _) = self.ram(id)?;
        act(move || {
            ram.compact();
            finish(|world| {
                world.count("compactions");
                Ok(())
            })
        })
    }

    pub(super) fn limit(&mut self, family: u16, kib: u32) -> Option<VerbTask> {
        let at = self.family_of(family)?;
        let family = &mut self.families[at];
        family.limited |= kib > 0;
        family.family.set_mem_limit(u64::from(kib) << 10);
        self.count("limits");
        None
    }

    pub(super) fn own_limits(&mut self, id: NodeId, cap_kib: u32, least_kib: u32) -> Option<VerbTask> {
        let (ram, family) = self.ram(id)?;
        let (cap, least) = (u64::from(cap_kib) << 10, u64::from(least_kib) << 10);
        // Guaranteed memory of one device also limits the other devices of the family.
        self.families[family].limited |= cap > 0 || least > 0;
        act(move || {
            let set = ram.set_own_limits(cap, least);
            finish(move |world| {
                world.count("limits");
                match set {
                    Ok(()) | Err(SetupError::GuaranteeAboveCap { .. } | SetupError::Guarantee { .. }) => {
                        Ok(())
                    }
                    Err(error) => finding(format!("limits could not be set: {error}")),
                }
            })
        })
    }
}
