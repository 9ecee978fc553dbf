//! Restoring: devices are made one after the other, each before those that lie over it, and nobody
//! gets any of them before the last byte of the file has been seen to be right.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::format::Over;
use super::known::{self, BEHIND_THE_END, Known, Refused};
use super::reader::{Block, Node, Page, Pages, Reader};
use super::{BaseIdentity, RestoreError};
use crate::codec::Algorithm;
use crate::ram::{Family, ForkConfig, Incoming, Ram};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Device, Error, Flags};

/// What forks in a file are restored over.
#[derive(Clone)]
pub enum Base {
    /// A read-only device.
    Device(Arc<dyn Device>),
    /// A snapshot.
    Snapshot(Ram),
}

impl Base {
    fn device(&self) -> &dyn Device {
        match self {
            Self::Device(device) => &**device,
            Self::Snapshot(ram) => ram,
        }
    }
}

/// Restores the devices of a file into a family, and returns them with their names. `bases` are
/// what those lie over that are forks of something which is not in the file: each is looked for
/// among them, by what the file knows it by. `progress` is given bytes of the file, done and in
/// all.
///
/// Objects that an algorithm of the family can read go in as they are; others are compressed anew.
/// Where memory is short pages are spilled, in a family that can do that.
///
/// # Errors
/// The file is foreign, newer, not complete or damaged; a base is missing or another one; no room
/// for a page. What was made is gone again.
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
    restore_watched(path, family, bases, watch)
}

/// As [`restore`]; it ends when `watch` says false, which is given bytes of the file, done and in
/// all.
///
/// # Errors
/// As [`restore`], and [`RestoreError::Cancelled`]: what was made is gone again.
pub fn restore_watched(
    path: &Path,
    family: &Family,
    bases: &[Base],
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Vec<(String, Ram)>, RestoreError> {
    let mut reader = Reader::open(path)?;
    let (nodes, all) = (Arc::clone(&reader.nodes), reader.end.file_bytes);
    let mut go_on = |done| if watch(done, all) { Ok(()) } else { Err(RestoreError::Cancelled) };
    go_on(0)?;
    let bases = find_bases((&reader.bases, &reader.nodes), bases, &mut || go_on(0).is_err())?;
    let mut loader = Loader::new(family, &nodes, bases);
    loop {
        let taken = match reader.next()? {
            None => break,
            Some(Block::Algorithm { algorithm, level, trained, dictionary }) => {
                loader.algorithm(algorithm, level, trained, dictionary)
            }
            Some(Block::Pages { node, pages }) => loader.pages(node as usize, pages),
        };
        taken.map_err(|refused| match refused {
            Refused::Damaged(what) => reader.damaged(what),
            Refused::Other(error) => error,
        })?;
        go_on(reader.at())?;
    }
    let restored = loader.finish()?;
    go_on(all)?;
    Ok(restored)
}

/// Finds the bases of a file among those that are given.
pub fn find_bases(
    (wanted, nodes): (&[BaseIdentity], &[Node]),
    given: &[Base],
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Vec<Base>, RestoreError> {
    let cancelled = RefCell::new(cancelled);
    let find = |(number, wanted): (usize, &BaseIdentity)| {
        let over = |node: &&Node| node.over == Over::Base(number as u32);
        let device = || nodes.iter().find(over).map(Node::label).unwrap_or_default();
        let mut last = None;
        for base in given {
            // One of another size need not be read.
            let size = base.device().geometry().size;
            let identity = if size == wanted.size || last.is_none() {
                let cancelled = || (cancelled.borrow_mut())();
                let known = BaseIdentity::of_unless(base.device(), wanted.check, &cancelled);
                known.map_err(RestoreError::Base)?.ok_or(RestoreError::Cancelled)?
            } else {
                continue;
            };
            if identity == *wanted {
                return Ok(base.clone());
            }
            last = Some(identity);
        }
        Err(match last {
            Some(given) => RestoreError::BaseDiffers { device: device(), wanted: *wanted, given },
            None => RestoreError::BaseMissing { device: device(), wanted: *wanted },
        })
    };
    wanted.iter().enumerate().map(find).collect()
}

struct Loader<'a> {
    family: &'a Family,
    nodes: &'a [Node],
    bases: Vec<Base>,
    /// The devices that are complete, snapshots as snapshots.
    done: Vec<Ram>,
    /// The one that comes next, live.
    filling: Option<Ram>,
    /// Nodes after which another one comes, and the live devices that become that.
    followed: HashSet<u32>,
    tails: HashMap<u32, Ram>,
    algorithms: Vec<Known>,
}

impl<'a> Loader<'a> {
    fn new(family: &'a Family, nodes: &'a [Node], bases: Vec<Base>) -> Self {
        let after = |node: &Node| if let Over::After(before) = node.over { Some(before) } else { None };
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

    fn algorithm(
        &mut self,
        algorithm: Algorithm,
        level: i32,
        trained: bool,
        dictionary: &[u8],
    ) -> Result<(), Refused> {
        let dictionary = Known::dictionary(dictionary)?;
        self.algorithms.push(Known::new(self.family, algorithm, level, trained, dictionary)?);
        Ok(())
    }

    /// The device of a number, when all before it are complete.
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

    /// An empty device for the node that comes next.
    fn make(&mut self) -> Result<Ram, RestoreError> {
        let node = &self.nodes[self.done.len()];
        let config = ForkConfig { size: Some(node.size), ..ForkConfig::default() };
        let made = match node.over {
            Over::Nothing => self.family.ram(node.size),
            Over::Node(below) => self.done[below as usize].fork(&config),
            Over::After(before) => match self.tails.remove(&before) {
                Some(ram) => ram.grow(node.size).map(|()| ram),
                None => unreachable!("one node comes after another, which is complete"),
            },
            Over::Base(base) => match &self.bases[base as usize] {
                Base::Snapshot(ram) if self.family.has(ram) && ram.is_snapshot() => ram.fork(&config),
                Base::Snapshot(ram) => self.family.fork(Arc::new(ram.clone()), &config),
                Base::Device(device) => self.family.fork(Arc::clone(device), &config),
            },
        };
        made.map_err(|error| RestoreError::Setup { device: node.label(), error })
    }

    /// Completes the node that comes next.
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
            return snapshot.map_err(|error| RestoreError::Setup { device: node.label(), error });
        }
        Ok(ram)
    }

    /// All devices that have names.
    fn finish(mut self) -> Result<Vec<(String, Ram)>, RestoreError> {
        while self.done.len() < self.nodes.len() {
            let complete = self.complete()?;
            self.done.push(complete);
        }
        let named = self.nodes.iter().zip(self.done);
        Ok(named.filter_map(|(node, ram)| Some((node.name.clone()?, ram))).collect())
    }

    fn pages(&mut self, node: usize, pages: Pages<'_>) -> Result<(), Refused> {
        let ram = self.device(node).map_err(Refused::Other)?;
        let failed = |page, error| {
            Refused::Other(RestoreError::Store { device: self.nodes[node].label(), page, error })
        };
        let size = self.nodes[node].size;
        // Of the page within which a device ends the rest is zeroes: it may grow.
        let bytes_of = |page: u64| (size - page * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize;
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
                    return Err(Refused::Damaged(BEHIND_THE_END));
                }
                for page in number..number + pages {
                    ram.put(page, incoming).map_err(|error| failed(page, error))?;
                }
                continue;
            }
            let incoming = known::incoming(&self.algorithms, &page, bytes_of(number), &mut content)?;
            match ram.put(number, incoming) {
                // As any write it waits until others have left memory.
                Err(Error::NoSpace) if ram.can_spill() => {
                    let bytes = bytes_of(number);
                    ram.write_at(number * PAGE_BYTES as u64, &content[..bytes], Flags::empty())
                }
                put => put,
            }
            .map_err(|error| failed(number, error))?;
        }
        Ok(())
    }
}
