//! Restoring of a saved file. Devices are created in order, parents first, and returned only when
//! the whole file is verified.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::file_codec::{self, BEHIND_THE_END, ContentError, FileCodec};
use super::format::{FileAlgorithm, NodeParent};
use super::reader::Node;
use super::reader::{Block, Page, Pages, Reader};
use super::{BaseIdentity, RestoreError};
use freestone_core::PAGE_BYTES;
use freestone_core::device::Device;
use freestone_ram::ram::{Family, ForkConfig, ParentDevice, Ram, SetupError};
use freestone_ram::transfer::{Incoming, StorePages as _};

/// A base for the forks of a saved file.
#[derive(Clone)]
pub enum Base {
    /// A read-only device of any kind.
    Device(Arc<dyn Device>),
    /// A snapshot, which can be of the same family.
    Snapshot(Ram),
}

impl Base {
    fn device(&self) -> &dyn Device {
        match self {
            Self::Device(device) => &**device,
            Self::Snapshot(ram) => ram,
        }
    }

    fn parent(&self, family: &Family) -> ParentDevice {
        match self {
            Self::Snapshot(ram) if family.is_same(&ram.family()) && ram.is_snapshot() => {
                ParentDevice::Snapshot(ram.clone())
            }
            // A base of another family is used as a plain device, even if it is a snapshot there.
            Self::Snapshot(ram) => ParentDevice::Device(Arc::new(ram.clone())),
            Self::Device(device) => ParentDevice::Device(Arc::clone(device)),
        }
    }
}

/// Restores the devices of a saved file into a family, and returns them with their names. `bases`
/// are the bases of forks that are not in the file; each is found by its identity. `progress`
/// receives the bytes read and the size of the file.
///
/// Compressed pages are stored as they are if an algorithm of the family can decompress them;
/// others are recompressed. If memory is short, pages are written back to a backing device, if any.
///
/// # Errors
/// Fails if the file was not saved by Freestone, is of a newer version, incomplete or damaged. Also
/// fails if a base is missing or different, or if a page cannot be stored. Devices already created
/// are removed.
pub fn restore(
    path: &Path,
    family: &Family,
    bases: &[Base],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<(String, Ram)>, RestoreError> {
    let watch = &mut |done, all| {
        progress(done, all);
        true
    };
    restore_with_progress(path, family, bases, watch)
}

/// Restores devices like [`restore`]. `watch` receives the bytes read and the size of the file; the
/// restore is cancelled when `watch` returns false.
///
/// # Errors
/// As [`restore`], and [`RestoreError::Cancelled`] if `watch` returned false. Devices already
/// created are removed.
pub fn restore_with_progress(
    path: &Path,
    family: &Family,
    bases: &[Base],
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Vec<(String, Ram)>, RestoreError> {
    let mut reader = Reader::open(path)?;
    let (nodes, all) = (Arc::clone(&reader.nodes), reader.end.file_bytes);
    let mut go_on = |done| if watch(done, all) { Ok(()) } else { Err(RestoreError::Cancelled) };
    go_on(0)?;
    let bases = find_bases(family, (&reader.bases, &reader.nodes), bases, &mut || go_on(0).is_err())?;
    let mut loader = Loader::new(family, &nodes, bases);
    loop {
        let taken = match reader.next()? {
            None => break,
            Some(Block::Algorithm(learned)) => loader.algorithm(learned),
            Some(Block::Pages { node, pages, .. }) => loader.pages(node as usize, pages),
        };
        taken.map_err(|refused| match refused {
            ContentError::Damaged(what) => reader.damaged(what),
            ContentError::Other(error) => error,
        })?;
        go_on(reader.at())?;
    }
    let restored = loader.finish()?;
    go_on(all)?;
    Ok(restored)
}

/// Finds each wanted base of a file among the given ones by its identity, and returns the bases as parents
/// of devices of the family.
pub fn find_bases(
    family: &Family,
    (wanted, nodes): (&[BaseIdentity], &[Node]),
    given: &[Base],
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Vec<ParentDevice>, RestoreError> {
    let cancelled = RefCell::new(cancelled);
    let find = |(number, wanted): (usize, &BaseIdentity)| {
        let over = |node: &&Node| node.over == NodeParent::Base(number as u32);
        let device = || nodes.iter().find(over).map(Node::label).unwrap_or_default();
        let mut last = None;
        for base in given {
            // A base of another size is not read, except for one that the error message describes.
            let size = base.device().geometry().size;
            let identity = if size == wanted.size || last.is_none() {
                let cancelled = || (cancelled.borrow_mut())();
                let known = BaseIdentity::of_cancellable(base.device(), wanted.check, &cancelled);
                known.map_err(RestoreError::Base)?.ok_or(RestoreError::Cancelled)?
            } else {
                continue;
            };
            if identity == *wanted {
                return Ok(base.parent(family));
            }
            last = Some(identity);
        }
        Err(match last {
            Some(given) => RestoreError::BaseMismatch { device: device(), wanted: *wanted, given },
            None => RestoreError::BaseMissing { device: device(), wanted: *wanted },
        })
    };
    wanted.iter().enumerate().map(find).collect()
}

/// Creates an empty live device over a parent.
pub fn create(family: &Family, size: u64, parent: ParentDevice) -> Result<Ram, SetupError> {
    let config = ForkConfig { size: Some(size), ..ForkConfig::default() };
    match parent {
        ParentDevice::Nothing => family.ram(size),
        ParentDevice::Device(device) => family.fork(device, &config),
        ParentDevice::Snapshot(ram) => ram.fork(&config),
    }
}

struct Loader<'a> {
    family: &'a Family,
    nodes: &'a [Node],
    bases: Vec<ParentDevice>,
    /// Completed nodes; a snapshot is stored as a snapshot.
    done: Vec<Ram>,
    /// Live device of the node that is being filled.
    filling: Option<Ram>,
    /// Nodes that another node of their chain follows, and the live devices for those following
    /// nodes.
    followed: HashSet<u32>,
    tails: HashMap<u32, Ram>,
    algorithms: Vec<FileCodec>,
}

impl<'a> Loader<'a> {
    fn new(family: &'a Family, nodes: &'a [Node], bases: Vec<ParentDevice>) -> Self {
        let after = |node: &Node| if let NodeParent::After(before) = node.over { Some(before) } else { None };
        Self {
            family,
            nodes,
            bases,
            done: Vec::new(),
            filling: None,
            followed: nodes.iter().filter_map(after).collect(),
            tails: HashMap::new(),
            algorithms: Vec::new(),
        }
    }

    fn algorithm(&mut self, learned: FileAlgorithm) -> Result<(), ContentError> {
        self.algorithms.push(FileCodec::new(self.family, learned)?);
        Ok(())
    }

    /// Returns the live device of a node, and completes all nodes before it.
    fn device(&mut self, node: usize) -> Result<Ram, RestoreError> {
        while self.done.len() < node {
            let complete = self.complete()?;
            self.done.push(complete);
        }
        if let Some(ram) = &self.filling {
            return Ok(ram.clone());
        }
        let ram = self.make()?;
        self.filling = Some(ram.clone());
        Ok(ram)
    }

    /// Creates the live device of the next node, without the node's own pages.
    fn make(&mut self) -> Result<Ram, RestoreError> {
        let node = &self.nodes[self.done.len()];
        let over = |parent| create(self.family, node.size, parent);
        let made = match node.over {
            NodeParent::Nothing => over(ParentDevice::Nothing),
            NodeParent::Node(below) => over(ParentDevice::Snapshot(self.done[below as usize].clone())),
            NodeParent::After(before) => match self.tails.remove(&before) {
                Some(ram) => ram.grow(node.size).map(|()| ram),
                None => unreachable!("one node comes after another, which is complete"),
            },
            NodeParent::Base(base) => over(self.bases[base as usize].clone()),
        };
        made.map_err(|error| node.setup_error(error))
    }

    /// Completes the next node: returns a snapshot of the live device, or the live device itself.
    fn complete(&mut self) -> Result<Ram, RestoreError> {
        let ram = match self.filling.take() {
            Some(ram) => ram,
            None => self.make()?,
        };
        let node = &self.nodes[self.done.len()];
        if node.snapshot {
            let snapshot = ram.snapshot();
            let number = self.done.len() as u32;
            if self.followed.contains(&number) {
                self.tails.insert(number, ram);
            }
            return snapshot.map_err(|error| node.setup_error(error));
        }
        if !node.is_disk {
            // A memory limit does not evict content that already exists.
            ram.set_own_limits(node.mem_limit, 0).map_err(|error| node.setup_error(error))?;
        }
        Ok(ram)
    }

    /// Completes all nodes and returns the named devices.
    fn finish(mut self) -> Result<Vec<(String, Ram)>, RestoreError> {
        while self.done.len() < self.nodes.len() {
            let complete = self.complete()?;
            self.done.push(complete);
        }
        let named = self.nodes.iter().zip(self.done);
        Ok(named.filter_map(|(node, ram)| Some((node.name.clone()?, ram))).collect())
    }

    fn pages(&mut self, node: usize, pages: Pages<'_>) -> Result<(), ContentError> {
        let ram = self.device(node).map_err(ContentError::Other)?;
        let node = &self.nodes[node];
        let failed = |page, error| ContentError::Other(node.store_error(page, error));
        // The rest of a partial last page must be zeroes, as the device may grow.
        let bytes_of = |page: u64| (node.size - page * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize;
        let mut content = [0; PAGE_BYTES];
        for (number, page) in pages {
            let run = match page {
                Page::Same { pattern, pages } => Some((Incoming::Same(pattern), pages)),
                Page::Parent { pages } => Some((Incoming::Parent, pages)),
                _ => None,
            };
            if let Some((incoming, pages)) = run {
                let is_zeroes = matches!(incoming, Incoming::Parent | Incoming::Same(0));
                if !is_zeroes && bytes_of(number + pages - 1) < PAGE_BYTES {
                    return Err(ContentError::Damaged(BEHIND_THE_END));
                }
                for page in number..number + pages {
                    ram.put(page, incoming).map_err(|error| failed(page, error))?;
                }
                continue;
            }
            let incoming = file_codec::incoming(&self.algorithms, &page, bytes_of(number), &mut content)?;
            ram.put_or_wait(number, incoming).map_err(|error| failed(number, error))?;
        }
        Ok(())
    }
}
