//! Creates nodes other than snapshots, forks and images, and removes nodes.

use std::collections::BTreeSet;

use freestone::codec::{Algorithm, Params};
use freestone::cow;
use freestone::device::Device;
use freestone::null::{self, Memory, PaceConfig, PacedDevice};
use freestone::power::{self, Power};
use freestone::quiesce::Quiesce;
use freestone::ram::{self, Secondary};

use super::{
    Below, DiskId, FamilyNode, Finding, Kind, Node, NodeId, OriginNode, PowerNode, RamNode, VerbTask, World,
    act, finding, finish,
};
use crate::disk::{DiskConfig, SimDisk};
use crate::ops::{Backing, DiskOp};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;
use crate::rt::time::Duration;

/// Time after which a request to a backing device counts as failed.
const BACKING_TIMEOUT: Duration = Duration::from_secs(2);

/// State of the node below a removed power layer. The removal is judged against it.
pub(super) struct RemovedPower {
    below: NodeId,
    disks: BTreeSet<DiskId>,
    may_fail: bool,
    durability_below: Durability,
}

impl World {
    pub(super) fn make_family(
        &mut self,
        limit_kib: u32,
        algorithm: u8,
        backing: Option<Backing>,
        auto: bool,
    ) -> Option<VerbTask> {
        let secondary = Secondary { algorithm: Algorithm::Zstd, params: Params::default() };
        let (algorithm, rest) =
            (usize::from(algorithm) % Algorithm::ALL.len(), usize::from(algorithm) / Algorithm::ALL.len());
        let (has_groups, has_dedup) = (rest.is_multiple_of(4), (rest / 4).is_multiple_of(3));
        let config = ram::Config {
            comp_algorithm: Algorithm::ALL[algorithm],
            mem_limit: u64::from(limit_kib) << 10,
            recomp_algorithms: [Some(secondary), None, None],
            auto_recompress: auto.then_some(Duration::from_secs(1)),
            auto_group: has_groups.then_some(Duration::from_secs(1)),
            auto_dedup: has_dedup.then_some(Duration::from_secs(1)),
            ..ram::Config::default()
        };
        let seed = self.next_write();
        act(move || {
            let made = match backing {
                None => ram::Family::new(config).map(|family| (family, None)),
                Some(Backing { kib, packed, inline }) => {
                    let size = (u64::from(kib) << 10).next_multiple_of(4096).max(4096);
                    let config_of = DiskConfig { size, logical_block: 4096, inline, ..DiskConfig::default() };
                    let disk = SimDisk::new(config_of, seed);
                    let control = disk.control();
                    ram::Family::new(config.backed_by(Arc::new(disk), packed))
                        .map(|family| (family, Some(control)))
                }
            };
            let made = made.and_then(|(family, backing)| Ok((family.ram(4096)?, family, backing)));
            finish(move |world| {
                let (probe, family, backing) = match made {
                    Ok(made) => made,
                    Err(error) => return finding(format!("a family could not be made: {error}")),
                };
                probe.set_backing_timeout(BACKING_TIMEOUT);
                let backing = backing.map(|control| {
                    let id = world.new_id();
                    world.disks.insert(id, control);
                    id
                });
                world.families.push(FamilyNode { family, probe, backing, limited: limit_kib > 0 });
                Ok(())
            })
        })
    }

    pub(super) fn make_ram(&mut self, family: u16, kib: u32) -> Option<VerbTask> {
        let at = self.family_of(family)?;
        let made = self.families[at].family.ram(u64::from(kib.max(4)) << 10);
        act(move || {
            finish(move |world| match made {
                Ok(ram) => {
                    world.add_ram("ram", ram, at, None, None);
                    Ok(())
                }
                Err(error) => finding(format!("a RAM disk could not be made: {error}")),
            })
        })
    }

    /// Adds the node of a RAM disk, fork or snapshot. `shown` is the content, by default zeroes.
    pub(super) fn add_ram(
        &mut self,
        name: &str,
        ram: ram::Ram,
        family: usize,
        shown: Option<Oracle>,
        below: Option<Below>,
    ) -> NodeId {
        let sectors = ram.geometry().size / SECTOR_BYTES as u64;
        let mut oracle =
            shown.unwrap_or_else(|| self.new_oracle(name, ram.geometry().size, Durability::Nothing));
        oracle.grow(sectors);
        let oracle = self.add_oracle(oracle);
        let device: Arc<dyn Device> = Arc::new(ram.clone());
        let kind = Kind::Ram(RamNode { ram, family, below });
        let id = self.add(name, kind, device, oracle, Vec::new());
        self.rename(id);
        id
    }

    /// Gives the oracle of a node the node's name, for messages.
    pub(super) fn rename(&mut self, id: NodeId) {
        let node = &self.nodes[&id];
        if let Some(oracle) = self.oracles.get_mut(&node.oracle) {
            oracle.rename(&node.name);
        }
    }

    pub(super) fn make_disk(&mut self, op: DiskOp) -> Option<VerbTask> {
        let config = DiskConfig {
            size: (u64::from(op.kib) << 10).next_multiple_of(4096).max(4096),
            logical_block: 512 << (op.block % 4),
            volatile_cache: op.volatile,
            inline: op.inline,
            // Do not report overlapping writes: an origin passes client requests through to the
            // disk.
            overlap: true,
            ..DiskConfig::default()
        };
        let disk = SimDisk::new(config, self.next_write());
        self.add_disk_node("disk", disk);
        None
    }

    /// Adds the node of a simulated disk, all zeroes.
    pub(super) fn add_disk_node(&mut self, name: &str, disk: SimDisk) -> NodeId {
        let geometry = disk.geometry();
        let durability = if geometry.volatile_cache { Durability::Flushed } else { Durability::Completed };
        let oracle = self.new_oracle(name, geometry.size, durability);
        let oracle = self.add_oracle(oracle);
        let number = self.add_disk(&disk);
        let id = self.add(name, Kind::Disk(number), Arc::new(disk), oracle, Vec::new());
        self.rename(id);
        id
    }

    pub(super) fn make_memory(kib: u32) -> Option<VerbTask> {
        let size = (u64::from(kib) << 10).max(4096);
        let made = Memory::new(null::Config::plain(size, 512));
        act(move || {
            finish(move |world| match made {
                Ok(memory) => {
                    let oracle = world.new_oracle("memory", size, Durability::Nothing);
                    let oracle = world.add_oracle(oracle);
                    let id = world.add("memory", Kind::Memory, Arc::new(memory), oracle, Vec::new());
                    world.rename(id);
                    Ok(())
                }
                Err(error) => finding(format!("a memory device could not be made: {error}")),
            })
        })
    }

    /// Adds a node for a device of any kind, all zeroes.
    #[cfg(test)]
    pub fn add_device(&mut self, name: &str, device: Arc<dyn Device>) {
        let oracle = self.new_oracle(name, device.geometry().size, Durability::Nothing);
        let oracle = self.add_oracle(oracle);
        self.add(name, Kind::Memory, device, oracle, Vec::new());
    }

    // ---- covers ---------------------------------------------------------------------------------

    /// Returns the nodes over which a layer or origin can be put.
    pub(super) fn coverable(&self) -> Vec<NodeId> {
        let mut all = self.nodes_that(|node| {
            let is_plain = match &node.kind {
                Kind::Ram(ram) => !ram.ram.is_snapshot(),
                Kind::Origin(origin) => !origin.is_half,
                Kind::Cow(cow) => !cow.merging,
                Kind::Base(_) => false,
                Kind::Disk(_) | Kind::Memory | Kind::File(_) | Kind::Power(_) | Kind::Layer => true,
            };
            is_plain && !node.covered
        });
        // Exclude nodes with a merging snapshot: it shows the same content, but would bypass the
        // cover.
        all.retain(|&id| !self.has_merge(id));
        all
    }

    pub(super) fn make_origin(&mut self, below: NodeId) -> Option<VerbTask> {
        let node = &self.nodes[&below];
        let (origin, oracle) = (cow::Origin::new(Arc::clone(&node.device)), node.oracle);
        let device: Arc<dyn Device> = Arc::new(origin.clone());
        let kind = Kind::Origin(OriginNode { origin, is_half: false });
        self.add("origin", kind, device, oracle, vec![below]);
        None
    }

    pub(super) fn make_layer(&mut self, below: NodeId, layer: u8) -> Option<VerbTask> {
        let node = &self.nodes[&below];
        let (device, oracle) = (Arc::clone(&node.device), node.oracle);
        let made: std::io::Result<Arc<dyn Device>> = match layer % 3 {
            0 => Ok(Arc::new(Quiesce::new(device))),
            1 => {
                let config = PaceConfig { mbps: 0, completion: Duration::from_micros(300) };
                PacedDevice::new(device, config).map(|paced| Arc::new(paced) as _)
            }
            _ => PacedDevice::new(device, PaceConfig { mbps: 200, completion: Duration::ZERO })
                .map(|paced| Arc::new(paced) as _),
        };
        match made {
            Ok(device) => {
                self.add("layer", Kind::Layer, device, oracle, vec![below]);
                None
            }
            Err(error) => {
                act(move || finish(move |_| finding(format!("a layer could not be made: {error}"))))
            }
        }
    }

    pub(super) fn make_power(&mut self, below: NodeId) -> Option<VerbTask> {
        let device = Arc::clone(&self.nodes[&below].device);
        act(move || {
            let made = Power::new(device, power::Config { capacity: 1 << 20, ..power::Config::default() });
            finish(move |world| {
                let power = match made {
                    Ok(power) => Arc::new(power),
                    Err(error) => return finding(format!("a power layer could not be made: {error}")),
                };
                let id = world.nodes[&below].oracle;
                let durability_below = world.oracles.get(&id).map_or(Durability::Nothing, Oracle::durability);
                world.replace_oracle(id, Durability::Flushed);
                let device: Arc<dyn Device> = Arc::clone(&power) as _;
                world.add(
                    "power",
                    Kind::Power(PowerNode { power, durability_below }),
                    device,
                    id,
                    vec![below],
                );
                Ok(())
            })
        })
    }

    /// Changes the durability of an oracle (what survives a crash) and keeps the current content.
    fn replace_oracle(&mut self, id: u32, durability: Durability) {
        if let Some(oracle) = self.oracles.get_mut(&id) {
            let name = oracle.name().to_owned();
            *oracle = oracle.snapshot(&name, durability);
        }
    }

    pub(super) fn power_layers(&self) -> Vec<NodeId> {
        self.nodes_that(|node| matches!(node.kind, Kind::Power(_)) && !node.covered)
    }

    pub(super) fn power_cut(&mut self, id: NodeId, seed: u64) -> Option<VerbTask> {
        let node = &self.nodes[&id];
        let Kind::Power(power) = &node.kind else { return None };
        let power = Arc::clone(&power.power);
        let before = self.causes(&node.disks);
        act(move || {
            let cut = power.cut(seed);
            finish(move |world| {
                let Some(node) = world.nodes.get(&id) else { return Ok(()) };
                let now = world.causes(&node.disks);
                let may_fail = world.may_be_damaged(node) || world.may_overflow(node);
                if let Some(oracle) = world.oracles.get_mut(&node.oracle) {
                    oracle.cut();
                }
                world.count("power cuts");
                match cut {
                    Err(error) if now == before && now.hung == 0 && !may_fail => {
                        finding(format!("a power cut failed without a cause: {error}"))
                    }
                    _ => Ok(()),
                }
            })
        })
    }

    // ---- removal --------------------------------------------------------------------------------

    /// Returns the nodes on which no other node lies.
    pub(super) fn removable(&self) -> Vec<NodeId> {
        let used: BTreeSet<NodeId> = self.nodes.values().flat_map(|node| node.on.iter().copied()).collect();
        let all = self.nodes_that(|_| true);
        all.into_iter().filter(|id| !used.contains(id)).collect()
    }

    /// Returns a node on which no other node lies, or `None` if the world is empty.
    pub fn any_removable(&self) -> Option<NodeId> {
        self.removable().last().copied()
    }

    /// Removes a node, and the nodes that are useless without it. A node that it covered keeps its
    /// content.
    pub fn remove(&mut self, id: NodeId) -> VerbTask {
        let mut gone = Vec::new();
        let before = self.nodes.get(&id).map(|node| self.causes(&node.disks));
        let power = self.remove_node(id, &mut gone);
        self.sweep();
        self.count("removals");
        self.removals.start();
        Box::new(move || {
            drop(gone);
            finish(move |world| {
                world.removals.finish();
                // If the last flush of the power layer failed, unflushed writes may be lost.
                let Some(RemovedPower { below, disks, may_fail, durability_below }) = power else {
                    return Ok(());
                };
                let causes = world.causes(&disks);
                if let Some(below) = world.nodes.get(&below) {
                    // A limit may have been set since the removal started.
                    let may_fail = may_fail || world.may_overflow(below);
                    let oracle = below.oracle;
                    if before != Some(causes) || causes.hung > 0 || may_fail {
                        world.oracles.get_mut(&oracle).map(Oracle::crash);
                    }
                    world.replace_oracle(oracle, durability_below);
                }
                Ok(())
            })
        })
    }

    /// Removes a node from the world, and moves it to `gone`. For a power layer, returns the state
    /// of the node below.
    pub(super) fn remove_node(&mut self, id: NodeId, gone: &mut Vec<Node>) -> Option<RemovedPower> {
        let node = self.nodes.remove(&id)?;
        let mut power = None;
        let mut useless = Vec::new();
        match &node.kind {
            Kind::Power(PowerNode { durability_below, .. }) => {
                let (disks, may_fail) =
                    (node.disks.clone(), self.may_be_damaged(&node) || self.may_overflow(&node));
                power = Some(RemovedPower {
                    below: node.on[0],
                    disks,
                    may_fail,
                    durability_below: *durability_below,
                });
            }
            // The COW device goes with its snapshot, since the content of a COW device is not
            // judged.
            Kind::Cow(cow) => {
                useless.push(cow.cow);
                let finished = cow.snapshot.merge_status() == cow::MergeStatus::Finished;
                if cow.merging
                    && !finished
                    && let Some(Kind::Origin(origin)) =
                        self.nodes.get_mut(&cow.origin).map(|node| &mut node.kind)
                {
                    origin.is_half = true;
                }
            }
            Kind::Origin(origin) if origin.is_half => useless.extend(&node.on),
            _ => {}
        }
        for below in &node.on {
            let covers = !matches!(&node.kind, Kind::Cow(cow) if cow.origin == *below);
            if let Some(below) = self.nodes.get_mut(below).filter(|_| covers) {
                below.covered = false;
            }
        }
        gone.push(node);
        while let Some(below) = useless.pop() {
            // The nodes below a useless node have the same content, so they are useless as well.
            useless.extend(self.nodes.get(&below).into_iter().flat_map(|node| &node.on));
            self.remove_node(below, gone);
        }
        power
    }

    /// Checks that the families (RAM disks that share a pool) hold no memory or blocks after the
    /// last node was removed.
    pub fn check_released(&self) -> Result<(), Finding> {
        for (at, family) in self.families.iter().enumerate() {
            let (stat, memory) = (family.family.stat(), family.probe.memory_overhead());
            let backing = family.probe.backing().unwrap_or_default();
            let groups = family.probe.group_stat().unwrap_or_default();
            let dedup = family.probe.dedup_stat().unwrap_or_default();
            let left = [
                stat.mem_used_total,
                stat.charged,
                stat.retiring,
                stat.guaranteed,
                stat.layers - 1,
                memory.leaves_bytes - groups.table_bytes - dedup.table_bytes,
                groups.groups,
                groups.pages,
                groups.bytes,
                groups.spilled_pages,
                dedup.objects,
                dedup.pages,
                dedup.bytes,
                dedup.saved_bytes,
                backing.used_bytes,
                backing.live_bytes,
                backing.spilled_pages,
                u64::from(backing.abandoned_writes),
            ];
            if left != [0; 18] {
                return finding(format!(
                    "family {at} did not release everything: {stat:?} {memory:?} {groups:?} {dedup:?} {backing:?}"
                ));
            }
        }
        Ok(())
    }
}
