//! The plan of a save: the snapshots to write, with parents before their children.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use super::format::NodeParent;
use super::{BaseCheck, BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX, SaveError};
use freestone_core::consistency_group::{self, FreezeTimeout, GroupMember};
use freestone_core::device::Device;
use freestone_core::slot::chain::Dirty;
use freestone_ram::ram::{ParentDevice, PendingSnapshot, Ram, SetupError};
use freestone_ram::transfer::{ReadStored as _, TrackSnapshot as _};

/// The nodes and bases of a save; parents come before their children.
#[derive(Default)]
pub struct Plan {
    pub nodes: Vec<Node>,
    pub bases: Vec<Base>,
    by_identity: HashMap<usize, u32>,
}

/// A snapshot to write to the file.
pub struct Node {
    pub ram: Ram,
    pub over: NodeParent,
    /// Name of the saved device; `None` if the snapshot is only saved as a parent.
    pub name: Option<String>,
    /// True if the node is restored as a snapshot, false if it is restored as a live device.
    pub snapshot: bool,
    /// Memory limit of the live device's own pages in bytes; 0: no limit.
    pub mem_limit: u64,
    pub label: String,
    depth: u32,
}

/// A device to save, with its name in the file.
pub struct NamedDevice {
    pub name: String,
    /// Snapshot of the device.
    pub ram: Ram,
    /// True if the snapshot was taken of a live device for this save.
    pub live: bool,
    /// Memory limit of the live device's own pages in bytes; 0: no limit.
    pub mem_limit: u64,
    /// Record of the changes before the moment of the save, if it was replaced then.
    pub changes: Option<Arc<Dirty>>,
}

/// Takes a snapshot of each live device, all at one moment, and returns the snapshots and that moment. `prepare`
/// sees each live device and its snapshot before.
pub fn freeze(
    devices: &[(&str, &Ram)],
    prepare: &mut dyn FnMut(&str, &Ram, &mut PendingSnapshot),
) -> Result<(Vec<NamedDevice>, SystemTime), SaveError> {
    let setup = |name: &str| {
        let device = name.to_owned();
        move |error| SaveError::Setup { device, error }
    };
    let live: Vec<_> = devices.iter().filter(|(_, ram)| !ram.is_snapshot()).collect();
    let mut pending: Vec<PendingSnapshot> = Vec::new();
    for (name, ram) in &live {
        let mut snapshot = ram.prepare_snapshot().map_err(setup(name))?;
        prepare(name, ram, &mut snapshot);
        pending.push(snapshot);
    }
    let mut together: Vec<&mut dyn GroupMember> =
        pending.iter_mut().map(|pending| pending as &mut dyn GroupMember).collect();
    consistency_group::take_snapshots(&mut together)
        .map_err(|late| setup(live[late.index].0)(SetupError::NotInTime(FreezeTimeout)))?;
    let (moment, mut pending) = (SystemTime::now(), pending.into_iter());
    let frozen = devices.iter().map(|(name, ram)| {
        let mut frozen = if ram.is_snapshot() { None } else { pending.next() };
        NamedDevice {
            name: (*name).to_owned(),
            live: frozen.is_some(),
            mem_limit: ram.own_limits().0,
            changes: frozen.as_mut().and_then(PendingSnapshot::take_changes),
            ram: frozen.map_or_else(|| (*ram).clone(), PendingSnapshot::into_snapshot),
        }
    });
    Ok((frozen.collect(), moment))
}

pub struct Base {
    pub device: Arc<dyn Device>,
    /// Name of a device made from the base, for error messages.
    pub label: String,
}

/// Checks the names and the number of the devices to save.
///
/// # Errors
/// A name is invalid; a name or a device is given twice; there are no devices, or too many.
pub fn check(devices: &[(&str, &Ram)]) -> Result<(), SaveError> {
    let mut known = HashSet::new();
    let mut given = HashMap::new();
    for &(name, ram) in devices {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(SaveError::Name(name.to_owned()));
        }
        if !known.insert(name) {
            return Err(SaveError::DuplicateName(name.to_owned()));
        }
        if let Some(other) = given.insert(ram.identity(), name) {
            return Err(SaveError::DuplicateDevice(other.to_owned(), name.to_owned()));
        }
    }
    match known.len() {
        0 => Err(SaveError::NoDevices),
        count if count > DEVICES_MAX => Err(SaveError::TooMany(count)),
        _ => Ok(()),
    }
}

impl Plan {
    pub fn new(frozen: Vec<NamedDevice>) -> Result<Self, SaveError> {
        let mut plan = Self::default();
        for NamedDevice { name, ram, live, mem_limit, .. } in frozen {
            let number = plan.add(&name, ram)?;
            let node = &mut plan.nodes[number as usize];
            (node.name, node.snapshot, node.label) = (Some(name.clone()), !live, name);
            node.mem_limit = mem_limit;
        }
        plan.link_chains();
        Ok(plan)
    }

    /// Links snapshots of the same origin into chains, and sorts the nodes so that each comes after
    /// the nodes it needs.
    fn link_chains(&mut self) {
        let place = |(number, node): (usize, &Node)| node.ram.place_in_chain().map(|place| (place, number));
        let mut places: Vec<_> = self.nodes.iter().enumerate().filter_map(place).collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            let [((chain, _), before), ((other, _), after)] = pair else { continue };
            if chain == other {
                self.nodes[*after].over = NodeParent::After(*before as u32);
            }
        }
        // A node only needs older nodes, so the dependencies have no cycle.
        let needs = |node: &Node| match node.over {
            NodeParent::Node(needed) | NodeParent::After(needed) => Some(needed as usize),
            NodeParent::Nothing | NodeParent::Base(_) => None,
        };
        let mut numbers: Vec<Option<u32>> = vec![None; self.nodes.len()];
        let mut order = Vec::new();
        for start in 0..self.nodes.len() {
            let missing = |&number: &usize| numbers[number].is_none();
            let path = std::iter::successors(Some(start).filter(missing), |&number| {
                needs(&self.nodes[number]).filter(missing)
            });
            for number in path.collect::<Vec<_>>().into_iter().rev() {
                numbers[number] = Some(order.len() as u32);
                order.push(number);
            }
        }
        let new = |old: u32| numbers[old as usize].unwrap_or_default();
        let mut nodes: Vec<Option<Node>> = self.nodes.drain(..).map(Some).collect();
        self.nodes = order.into_iter().filter_map(|number| nodes[number].take()).collect();
        for node in &mut self.nodes {
            node.over = match node.over {
                NodeParent::Node(old) => NodeParent::Node(new(old)),
                NodeParent::After(old) => NodeParent::After(new(old)),
                over => over,
            };
        }
    }

    /// Adds a snapshot and its parents unless they were added before. Returns the snapshot's node
    /// number.
    fn add(&mut self, name: &str, ram: Ram) -> Result<u32, SaveError> {
        let mut above = Vec::new();
        let mut next = ram;
        let (mut over, mut depth) = loop {
            if let Some(&known) = self.by_identity.get(&next.identity()) {
                if above.is_empty() {
                    return Ok(known);
                }
                break (NodeParent::Node(known), self.nodes[known as usize].depth);
            }
            let lower = next.parent_device();
            above.push(next);
            match lower {
                ParentDevice::Nothing => break (NodeParent::Nothing, 0),
                ParentDevice::Device(device) => break (NodeParent::Base(self.base(device, name)), 0),
                ParentDevice::Snapshot(below) => next = below,
            }
        };
        while let Some(ram) = above.pop() {
            depth += 1;
            if depth > DEPTH_MAX {
                return Err(SaveError::TooDeep(name.to_owned()));
            }
            let number = self.nodes.len() as u32;
            if self.nodes.len() >= DEVICES_MAX {
                return Err(SaveError::TooMany(self.nodes.len() + 1));
            }
            self.by_identity.insert(ram.identity(), number);
            let label = format!("a snapshot below {name}");
            self.nodes.push(Node { ram, over, name: None, snapshot: true, mem_limit: 0, label, depth });
            over = NodeParent::Node(number);
        }
        Ok(self.nodes.len() as u32 - 1)
    }

    fn base(&mut self, device: Arc<dyn Device>, name: &str) -> u32 {
        let same = |base: &Base| std::ptr::addr_eq(Arc::as_ptr(&base.device), Arc::as_ptr(&device));
        let known = self.bases.iter().position(same);
        known.unwrap_or_else(|| {
            self.bases.push(Base { device, label: name.to_owned() });
            self.bases.len() - 1
        }) as u32
    }

    pub fn identify_bases(
        &self,
        check: BaseCheck,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<BaseIdentity>, SaveError> {
        let identify = |base: &Base| {
            let known = BaseIdentity::of_cancellable(&*base.device, check, cancelled);
            let known = known.map_err(|error| SaveError::Base { device: base.label.clone(), error })?;
            known.ok_or(SaveError::Cancelled)
        };
        self.bases.iter().map(identify).collect()
    }
}
