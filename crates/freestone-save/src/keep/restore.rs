//! Restoring of kept devices: devices are created at once, and their pages stay in the files until
//! they are loaded.
//!
//! A snapshot stores only pages that differ from the next younger node of its chain (the snapshots
//! of a device and the device itself). Such pages are loaded before the devices are published: the
//! origin's writers could not preserve a snapshot page that is still in a file. Other pages can
//! stay in the files: pages common to the origin and all of its snapshots, and pages that only the
//! origin has.

use std::collections::HashMap;
use std::sync::Arc;

use super::file::{FileMetadata, LoadedBlock};
use super::index::{Entry, divide, join, overlay};
use super::load::{BackgroundLoad, Stage};
use super::source::{Index, Part};
use crate::save::file_codec::{ContentError, FileCodec};
use crate::save::format::NodeParent;
use crate::save::reader::Node;
use crate::save::restore::{Base, create, find_bases};
use crate::save::{BaseIdentity, RestoreError};
use freestone_ram::ram::{Family, ParentDevice, Ram};
use freestone_ram::transfer::{Incoming, RestoreInto as _, StorePages as _};

/// The merged content of the files of a chain.
pub struct MergedChain {
    pub bases: Vec<BaseIdentity>,
    pub nodes: Arc<[Node]>,
    pub entries: Vec<Vec<Entry>>,
    /// The files in order, the whole one first.
    pub files: Vec<FileMetadata>,
}

impl MergedChain {
    /// Merges the files, given in order from the whole one to the newest increment; `None` without
    /// a file.
    pub fn new(mut files: Vec<FileMetadata>) -> Option<Self> {
        let mut entries: Vec<Vec<Entry>> = Vec::new();
        for file in &mut files {
            let newer = std::mem::take(&mut file.entries);
            entries.resize_with(newer.len(), Vec::new);
            for (older, newer) in entries.iter_mut().zip(newer) {
                *older = overlay(std::mem::take(older), newer);
            }
        }
        let newest = files.last()?;
        Some(Self { bases: newest.bases.clone(), nodes: Arc::clone(&newest.nodes), entries, files })
    }
}

pub struct RestoredDevices {
    pub devices: Vec<Ram>,
    pub loading: BackgroundLoad,
}

/// Creates the devices, with most pages still in the files.
///
/// # Errors
/// Fails like [`restore`](crate::save::restore), except for pages that stay in the files.
pub fn make(
    mut whole: MergedChain,
    family: &Family,
    bases: &[Base],
    cancelled: &dyn Fn() -> bool,
) -> Result<RestoredDevices, RestoreError> {
    let bases = find_bases(family, (&whole.bases, &whole.nodes), bases, &mut || cancelled())?;
    let mut parts = Vec::new();
    for FileMetadata { algorithms, blocks, .. } in whole.files {
        let known = algorithms.into_iter().map(|learned| {
            FileCodec::new(family, learned).map_err(|refused| match refused {
                ContentError::Damaged(what) => {
                    RestoreError::Damaged { path: blocks.path().to_owned(), at: 0, what }
                }
                ContentError::Other(error) => error,
            })
        });
        parts.push(Part { algorithms: known.collect::<Result<_, _>>()?, blocks });
    }
    let mut maker = DeviceBuilder {
        family,
        nodes: &whole.nodes,
        bases,
        parts: parts.into(),
        made: whole.nodes.iter().map(|_| None).collect(),
        stages: Vec::new(),
        by_node: vec![None; whole.nodes.len()],
        cancelled,
    };
    for chain in chains(&whole.nodes) {
        maker.chain(&chain, &mut whole.entries)?;
    }
    let devices = maker.made.into_iter().flatten().collect();
    Ok(RestoredDevices { devices, loading: BackgroundLoad::new(maker.parts, maker.stages, maker.by_node) })
}

/// Groups the nodes into chains (a device and its snapshots); each chain is sorted after its
/// parent.
fn chains(nodes: &[Node]) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut by_last: HashMap<usize, usize> = HashMap::new();
    for (number, node) in nodes.iter().enumerate() {
        let chain = match node.over {
            NodeParent::After(before) => by_last.remove(&(before as usize)),
            _ => None,
        };
        let chain = chain.unwrap_or_else(|| {
            chains.push(Vec::new());
            chains.len() - 1
        });
        chains[chain].push(number);
        by_last.insert(number, chain);
    }
    // Sort by depth: a chain's parent may be the last node of a chain that begins later in the
    // file.
    chains.sort_by_key(|chain| nodes_below(nodes, chain[0]));
    chains
}

/// Returns the number of parent chains below the node's chain.
fn nodes_below(nodes: &[Node], number: usize) -> usize {
    let mut over = nodes[number].over;
    let mut depth = 0;
    while let NodeParent::Node(below) | NodeParent::After(below) = over {
        depth += usize::from(matches!(over, NodeParent::Node(_)));
        over = nodes[below as usize].over;
    }
    depth
}

struct DeviceBuilder<'a> {
    family: &'a Family,
    nodes: &'a [Node],
    bases: Vec<ParentDevice>,
    parts: Arc<[Part]>,
    made: Vec<Option<Ram>>,
    stages: Vec<Stage>,
    by_node: Vec<Option<usize>>,
    cancelled: &'a dyn Fn() -> bool,
}

impl DeviceBuilder<'_> {
    fn chain(&mut self, chain: &[usize], entries: &mut [Vec<Entry>]) -> Result<(), RestoreError> {
        let (Some(&first), Some(&last)) = (chain.first(), chain.last()) else { return Ok(()) };
        let with = |entries: Vec<Entry>, wanted: fn(&Entry) -> bool| -> Vec<Entry> {
            entries.into_iter().filter(wanted).collect()
        };
        // By node of the chain: entries to store in memory before the devices are published.
        let mut put: Vec<Vec<Entry>> = Vec::new();
        let (index, stays) = if first == last {
            put.push(Vec::new());
            (with(std::mem::take(&mut entries[first]), |entry| !entry.is_below()), Vec::new())
        } else {
            let of = |number: usize| entries[number].clone();
            let changed = chain[1..].iter().fold(Vec::new(), |all, &number| overlay(all, of(number)));
            let has_content = |entry: &Entry| !entry.is_below() && !entry.is_lost();
            // Pages lost in any node stay in the index, so that reads of them fail. A node that has
            // lost a page refers to the parent for that page.
            let unreadable =
                chain.iter().fold(Vec::new(), |all, &number| overlay(all, with(of(number), Entry::is_lost)));
            let oldest = with(of(first), has_content);
            let (eager, common) = divide(&oldest, &changed);
            // A snapshot without content at a page refers to the parent. If the origin's page
            // stayed in the file, the snapshot would find that page: such pages of the origin must
            // be loaded now.
            let mut known = eager.clone();
            for &number in &chain[1..chain.len() - 1] {
                known = divide(&known, &with(of(number), Entry::is_below)).1;
            }
            let known = divide(&known, &unreadable).1;
            let (stays, other) = divide(&with(of(last), has_content), &known);
            put.push(eager);
            put.extend(chain[1..chain.len() - 1].iter().map(|&number| of(number)));
            put.push(join(other, with(of(last), |entry| entry.is_below() || entry.is_lost())));
            // When a snapshot page is stored now, it is removed from the origin's source, as by a
            // write.
            (join(join(common, stays.clone()), unreadable), stays)
        };
        let size = self.nodes[last].size;
        let index = Arc::new(Index { entries: index, parts: Arc::clone(&self.parts), size });
        let live = self.live(chain, &index)?;
        // Pages are stored and read with the final size of the device.
        for (&number, entries) in chain.iter().zip(&put) {
            let node = &self.nodes[number];
            let failed = |error| node.setup_error(error);
            if number != first {
                live.grow(node.size).map_err(failed)?;
            }
            self.put(&live, number, &index, entries)?;
            if number == last && first != last {
                for entry in &stays {
                    for page in entry.page()..entry.end() {
                        live.put(page, Incoming::Parent).map_err(|error| node.store_error(page, error))?;
                    }
                }
            }
            self.made[number] =
                Some(if node.snapshot { live.snapshot().map_err(failed)? } else { live.clone() });
        }
        Ok(())
    }

    /// Creates the live device of a chain, with the size of the chain's first node.
    fn live(&mut self, chain: &[usize], index: &Arc<Index>) -> Result<Ram, RestoreError> {
        let node = &self.nodes[chain[0]];
        let below = match node.over {
            NodeParent::Nothing => ParentDevice::Nothing,
            NodeParent::Node(below) | NodeParent::After(below) => match &self.made[below as usize] {
                Some(ram) => ParentDevice::Snapshot(ram.clone()),
                None => unreachable!("chains come after what they lie over"),
            },
            NodeParent::Base(base) => self.bases[base as usize].clone(),
        };
        if index.entries.is_empty() {
            return create(self.family, node.size, below).map_err(|error| node.setup_error(error));
        }
        let source = Arc::clone(index) as Arc<dyn freestone_ram::transfer::Source>;
        let staged = self.family.staged(node.size, below, source);
        let (ram, loader) = staged.map_err(|error| node.setup_error(error))?;
        for &number in chain {
            self.by_node[number] = Some(self.stages.len());
        }
        self.stages.push(Stage::new(loader, Arc::clone(index)));
        Ok(ram)
    }

    /// Stores the pages of `entries` in a device that is not published yet.
    fn put(
        &self,
        ram: &Ram,
        number: usize,
        index: &Arc<Index>,
        entries: &[Entry],
    ) -> Result<(), RestoreError> {
        let node = &self.nodes[number];
        let mut loaded = LoadedBlock::default();
        for entry in entries {
            if (self.cancelled)() {
                return Err(RestoreError::Cancelled);
            }
            if entry.is_lost() {
                for page in entry.page()..entry.end() {
                    ram.put(page, Incoming::Parent).map_err(|error| node.store_error(page, error))?;
                }
                continue;
            }
            let blocks = &self.parts[entry.file()].blocks;
            let data = loaded.data(blocks, entry, "a block of a snapshot's pages is damaged")?;
            for page in entry.page()..entry.end() {
                let stored = index.unpack(page, entry, data, |incoming| ram.put_or_wait(page, incoming));
                stored.map_err(|error| node.store_error(page, error))?;
            }
        }
        Ok(())
    }
}
