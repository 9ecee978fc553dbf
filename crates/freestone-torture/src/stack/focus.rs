//! What ops are about for a while: a number that an op has is then taken modulo what belongs to one
//! disk, or to one family, where there is any of that. What goes wrong between devices needs
//! several ops that meet the same ones.

use super::{DiskId, Kind, NodeId, World, pick};
use crate::ops::Focus;

/// What is in focus.
#[derive(Debug, Clone, Copy)]
pub(super) enum Focused {
    /// A disk, all that lies on it, and the COW devices of that.
    Tree(NodeId),
    Family(usize),
}

impl World {
    /// From now on ops are about this.
    pub fn focus(&mut self, on: Focus) {
        self.focused = match on {
            Focus::All => None,
            Focus::Disk(number) => {
                let all = self.nodes_that(|node| matches!(node.kind, Kind::Disk(_)));
                let trees: Vec<NodeId> =
                    all.iter().copied().filter(|&id| self.origin_on(id).is_some()).collect();
                pick(if trees.is_empty() { &all } else { &trees }, number).map(Focused::Tree)
            }
            Focus::Family(number) => self.family_of(number).map(Focused::Family),
        };
    }

    /// One of these nodes: of those in focus, where there are any.
    pub fn choose(&self, all: &[NodeId], number: u16) -> Option<NodeId> {
        let near = match self.focused {
            None => Vec::new(),
            Some(Focused::Tree(disk)) => self.tree(disk),
            Some(Focused::Family(family)) => self.nodes_that(|node| node.families.contains(&family)),
        };
        let near: Vec<NodeId> = all.iter().copied().filter(|id| near.contains(id)).collect();
        pick(if near.is_empty() { all } else { &near }, number)
    }

    /// Some of these, each once.
    pub(super) fn several(&self, all: &[NodeId], numbers: &[u16]) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = numbers.iter().filter_map(|&number| self.choose(all, number)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// A family: the one in focus, if there is one.
    pub(super) fn family_of(&self, number: u16) -> Option<usize> {
        match self.focused {
            Some(Focused::Family(family)) => Some(family),
            _ => pick(&(0..self.families.len()).collect::<Vec<_>>(), number),
        }
    }

    /// A simulated disk: of those in focus, where there are any.
    pub(super) fn disk_of(&self, number: u16) -> Option<DiskId> {
        let near: Vec<DiskId> = match self.focused {
            None => Vec::new(),
            Some(Focused::Tree(disk)) => {
                let kinds = self.tree(disk).into_iter().filter_map(|id| Some(&self.nodes.get(&id)?.kind));
                kinds.filter_map(|kind| if let Kind::Disk(id) = kind { Some(*id) } else { None }).collect()
            }
            Some(Focused::Family(family)) => self.families[family].backing.into_iter().collect(),
        };
        let all: Vec<DiskId> = self.disks.keys().copied().collect();
        pick(if near.is_empty() { &all } else { &near }, number)
    }
}
