//! The focus of ops: restricts the nodes that ops choose from to those of one disk or one family
//! (RAM disks that share a pool). If none of these suits an op, the restriction does not apply.
//! Defects in the interaction of devices only appear if several ops use the same devices.

use super::{DiskId, Kind, NodeId, World, pick};
use crate::ops::Focus;

/// The devices from which ops choose with preference.
#[derive(Debug, Clone, Copy)]
pub(super) enum CurrentFocus {
    /// The disk with this node, everything that lies on it, and the COW devices of the snapshots.
    Tree(NodeId),
    Family(usize),
}

impl World {
    /// Sets the focus of the following ops. Without any disk or family, the focus is unset.
    pub fn focus(&mut self, on: Focus) {
        self.current_focus = match on {
            Focus::All => None,
            Focus::Disk(number) => {
                let all = self.nodes_that(|node| matches!(node.kind, Kind::Disk(_)));
                let trees: Vec<NodeId> =
                    all.iter().copied().filter(|&id| self.origin_on(id).is_some()).collect();
                pick(if trees.is_empty() { &all } else { &trees }, number).map(CurrentFocus::Tree)
            }
            Focus::Family(number) => self.family_of(number).map(CurrentFocus::Family),
        };
    }

    /// Chooses one of the nodes in `all`: among those in focus if there are any. `None` if `all` is
    /// empty.
    pub fn choose(&self, all: &[NodeId], number: u16) -> Option<NodeId> {
        let near = match self.current_focus {
            None => Vec::new(),
            Some(CurrentFocus::Tree(disk)) => self.tree(disk),
            Some(CurrentFocus::Family(family)) => self.nodes_that(|node| node.families.contains(&family)),
        };
        let near: Vec<NodeId> = all.iter().copied().filter(|id| near.contains(id)).collect();
        pick(if near.is_empty() { all } else { &near }, number)
    }

    /// Chooses several of the nodes in `all`, without duplicates.
    pub(super) fn several(&self, all: &[NodeId], numbers: &[u16]) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = numbers.iter().filter_map(|&number| self.choose(all, number)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Chooses a family: the one in focus, or any. `None` if no family exists.
    pub(super) fn family_of(&self, number: u16) -> Option<usize> {
        match self.current_focus {
            Some(CurrentFocus::Family(family)) => Some(family),
            _ => pick(&(0..self.families.len()).collect::<Vec<_>>(), number),
        }
    }

    /// Chooses a simulated disk, among those in focus if there are any.
    pub(super) fn disk_of(&self, number: u16) -> Option<DiskId> {
        let near: Vec<DiskId> = match self.current_focus {
            None => Vec::new(),
            Some(CurrentFocus::Tree(disk)) => {
                let kinds = self.tree(disk).into_iter().filter_map(|id| Some(&self.nodes.get(&id)?.kind));
                kinds.filter_map(|kind| if let Kind::Disk(id) = kind { Some(*id) } else { None }).collect()
            }
            Some(CurrentFocus::Family(family)) => self.families[family].backing.into_iter().collect(),
        };
        let all: Vec<DiskId> = self.disks.keys().copied().collect();
        pick(if near.is_empty() { &all } else { &near }, number)
    }
}
