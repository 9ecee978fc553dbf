//! What is written: the snapshots that are saved, and those that they lie over, each before what
//! lies over it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::format::Over;
use super::{BaseCheck, BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX, SaveError};
use crate::ram::{Lower, Ram};
use freestone_core::device::Device;

/// What is written, each before what lies over it.
#[derive(Default)]
pub struct Plan {
    pub nodes: Vec<Node>,
    pub bases: Vec<Base>,
    by_identity: HashMap<usize, u32>,
}

/// A snapshot that is written.
pub struct Node {
    pub ram: Ram,
    pub over: Over,
    /// Nobody's, where it is there only for those that lie over it.
    pub name: Option<String>,
    /// It is restored as a snapshot, not as a live device.
    pub snapshot: bool,
    /// How messages call it.
    pub label: String,
    depth: u32,
}

/// A device that others lie over and that is not saved.
pub struct Base {
    pub device: Arc<dyn Device>,
    /// One that was made from it.
    pub label: String,
}

/// # Errors
/// A name that cannot be; a name or a device that is there twice; none at all.
pub fn check(devices: &[(&str, &Ram)]) -> Result<(), SaveError> {
    let mut known = HashSet::new();
    let mut given = HashMap::new();
    for &(name, ram) in devices {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(SaveError::Name(name.to_owned()));
        }
        if !known.insert(name) {
            return Err(SaveError::TwiceNamed(name.to_owned()));
        }
        if let Some(other) = given.insert(ram.identity(), name) {
            return Err(SaveError::TwiceGiven(other.to_owned(), name.to_owned()));
        }
    }
    match known.len() {
        0 => Err(SaveError::Nothing),
        count if count > DEVICES_MAX => Err(SaveError::TooMany(count)),
        _ => Ok(()),
    }
}

impl Plan {
    /// Of snapshots with their names, and whether each was taken of a live device for this.
    pub fn new(frozen: Vec<(String, Ram, bool)>) -> Result<Self, SaveError> {
        let mut plan = Self::default();
        for (name, ram, live) in frozen {
            let number = plan.add(&name, ram)?;
            let node = &mut plan.nodes[number as usize];
            (node.name, node.snapshot, node.label) = (Some(name.clone()), !live, name);
        }
        plan.link_chains();
        Ok(plan)
    }

    /// Has snapshots of one origin follow each other, and brings all into an order in which each
    /// comes after what it needs.
    fn link_chains(&mut self) {
        let place = |(number, node): (usize, &Node)| node.ram.place_in_chain().map(|place| (place, number));
        let mut places: Vec<_> = self.nodes.iter().enumerate().filter_map(place).collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            let [((chain, _), before), ((other, _), after)] = pair else { continue };
            if chain == other {
                self.nodes[*after].over = Over::After(*before as u32);
            }
        }
        // What a node needs is older than the node, so there is no circle.
        let needs = |node: &Node| match node.over {
            Over::Node(needed) | Over::After(needed) => Some(needed as usize),
            Over::Nothing | Over::Base(_) => None,
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
                Over::Node(old) => Over::Node(new(old)),
                Over::After(old) => Over::After(new(old)),
                over => over,
            };
        }
    }

    /// Adds a snapshot and what it lies over, as far as that is not there yet.
    fn add(&mut self, name: &str, ram: Ram) -> Result<u32, SaveError> {
        let mut above = Vec::new();
        let mut next = ram;
        let (mut over, mut depth) = loop {
            if let Some(&known) = self.by_identity.get(&next.identity()) {
                if above.is_empty() {
                    return Ok(known);
                }
                break (Over::Node(known), self.nodes[known as usize].depth);
            }
            let lower = next.lower();
            above.push(next);
            match lower {
                Lower::Nothing => break (Over::Nothing, 0),
                Lower::Device(device) => break (Over::Base(self.base(device, name)), 0),
                Lower::Snapshot(below) => next = below,
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
            self.nodes.push(Node { ram, over, name: None, snapshot: true, label, depth });
            over = Over::Node(number);
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

    /// What each base is known by.
    pub fn identify_bases(
        &self,
        check: BaseCheck,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<BaseIdentity>, SaveError> {
        let identify = |base: &Base| {
            let known = BaseIdentity::of_unless(&*base.device, check, cancelled);
            let known = known.map_err(|error| SaveError::Base { device: base.label.clone(), error })?;
            known.ok_or(SaveError::Cancelled)
        };
        self.bases.iter().map(identify).collect()
    }
}
