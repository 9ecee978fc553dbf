//! Takes over a family from a process that has ended or was killed.
//!
//! The memory of an [adoptable](crate::ram::Config::adoptable) family is in files without names (memfds), whose
//! descriptors another process holds, too. Lists of free space, in memory and on the backing device, counters
//! and back-references are in the heap, and are built again from the slots.
//!
//! # What a kill can leave
//! * An object or a node that no slot or entry refers to: it is free.
//! * A locked slot: the lock is removed. If its object was being overwritten, the copy is [completed](redo).
//! * Objects of groups, and shared objects, that no page refers to: they are free.
//! * The same object in two slots of a chain, since a word is stored in its new slot before it leaves the
//!   former one: the slot of the older snapshot is emptied. It then reads the same page from the younger one.
//! * Two live layers of one device, since a rewind records the new layer first: the new one is the device's.
//! * A page that was being read from the backing device: it is still there.
//! * An object on the backing device that no slot refers to, because it was still being written, or was kept
//!   as a clean copy: its space is free.
//! * A snapshot that was being removed: its removal begins anew.
//! * A layer that was being freed, or was not recorded yet: its memory is free.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::adopt_error::AdoptError;
use super::adopted_tables::{Tables, words};
use super::{Family, WeakFamily};
use crate::codec::PRIORITIES;
use crate::pool::Pool;
use crate::pool::redo::{Interrupted, Redo, RedoFile};
use crate::ram::device::Ram;
use crate::ram::device::chain::Chain;
use crate::ram::device::parent::{BELOW_DEPTH_MAX, Base, Parent};
use crate::ram::device::parts::FamilyParts;
use crate::ram::memory::config::{Backing, Config, SetupError};
use crate::ram::memory::layer::{LAYER_IDS, Layer};
use crate::ram::memory::limits::Limits;
use crate::ram::memory::pages::Memory;
use crate::ram::memory::record::{self, LayerRecord, LayerState, SharedTable};
use crate::ram::recompress::auto;
use freestone_core::device::Device;
use freestone_core::slot::Word;
use freestone_core::slot::adoption::{Adoption, TableFiles};

/// The files with the memory of a family, which exists while any process has their descriptors.
#[derive(Debug, Clone)]
pub struct FamilyFiles<F> {
    /// Version of the layout, and objects that are being overwritten.
    pub family: F,
    /// Roots of slot tables, and records of devices.
    pub roots: F,
    /// Slot tables.
    pub nodes: F,
    /// Compressed pages.
    pub pool: F,
    /// The [file](crate::ram::Backing::file) of the backing device, if the family has one.
    pub backing: Option<F>,
}

/// The memory of a family whose process has ended, before this one takes it over.
pub struct FamilyMemory {
    redo: RedoFile,
    interrupted: Vec<Interrupted>,
    adoption: Adoption,
    records: Vec<(u32, LayerRecord)>,
    /// Tables that no layer has.
    shared: Vec<(u32, SharedTable)>,
    pool: OwnedFd,
    backing: Option<Arc<OwnedFd>>,
}

/// A device of an adopted family.
pub struct Adopted {
    /// Key of the device: see [`Ram::set_keys`]; 0 if it has none, because the process was killed first.
    pub key: u64,
    /// The device.
    pub ram: Ram,
}

/// A chain of adopted layers.
struct AdoptedChain {
    origin: (LayerRecord, Arc<Layer>),
    /// Snapshots, oldest first.
    snapshots: Vec<(LayerRecord, Arc<Layer>)>,
}

impl FamilyMemory {
    /// Opens the memory. Changes nothing in it.
    ///
    /// # Errors
    /// Fails if the files are unusable.
    pub fn open(files: FamilyFiles<OwnedFd>) -> Result<Self, AdoptError> {
        let FamilyFiles { family, roots, nodes, pool, backing } = files;
        let (redo, interrupted) = Redo::read(family)?;
        let adoption = Adoption::begin(TableFiles { nodes, roots })?;
        let all = adoption.records()?;
        let shared =
            all.iter().filter_map(|(root, words)| Some((*root, SharedTable::decode(words)?))).collect();
        let records = used_records(all)?;
        Ok(Self { redo, interrupted, adoption, records, shared, pool, backing: backing.map(Arc::new) })
    }

    /// Returns the file of the backing device, if the family has one.
    pub fn backing(&self) -> Option<&Arc<OwnedFd>> {
        self.backing.as_ref()
    }

    /// Returns the [note](Family::set_note), empty if there is none.
    pub fn note(&self) -> &[u8] {
        self.redo.note()
    }

    /// Returns the content of the dictionary of the algorithm with this priority, 0 for the primary one. `None` if
    /// the algorithm has none.
    pub fn dictionary(&self, priority: usize) -> Option<&[u8]> {
        self.redo.dictionary(priority).filter(|dictionary| !dictionary.is_empty())
    }

    /// Returns the keys of the family's devices; see [`Ram::set_keys`].
    pub fn keys(&self) -> impl Iterator<Item = u64> {
        let is_device = |state| matches!(state, LayerState::Live | LayerState::Snapshot);
        let devices = self.records.iter().filter(move |(_, record)| is_device(record.state));
        devices.map(|(_, record)| record.key).filter(|key| *key != 0)
    }

    /// Returns the keys of devices outside the family from which its devices read.
    pub fn base_keys(&self) -> impl Iterator<Item = u64> {
        let inside = keys_inside(&self.records);
        self.records.iter().map(|(_, record)| record.parent).filter(move |key| !inside.contains(key))
    }

    /// Takes over the family. No write that its process had completed is lost; of another write, each page has
    /// the old or the new content. Memory limits of devices are not adopted.
    ///
    /// `config` must have the algorithms of the family with their [dictionaries](Self::dictionary), and its backing
    /// device with the same layout; the size of the disk is ignored. No write of the former process to the backing
    /// device may be in progress. `base` returns the device with a key from which forks of other families' devices
    /// read. A device that the caller drops is removed.
    ///
    /// # Errors
    /// Fails if the content is damaged, a base is missing, or memory is short. Another attempt, by any process,
    /// can succeed.
    pub fn adopt(
        self,
        config: Config,
        base: &mut dyn FnMut(u64) -> Option<Arc<dyn Device>>,
    ) -> Result<(Family, Vec<Adopted>), AdoptError> {
        config.check_adoptable()?;
        let Self { redo, interrupted, mut adoption, records, shared, pool, backing: _ } = self;
        let bases = find_bases(&records, base)?;
        let mut pool =
            Pool::adopt(pool, Arc::clone(&adoption.common().same_filled_leaves)).map_err(AdoptError::File)?;
        let store = config.backing.as_ref().map(Backing::store).transpose()?;
        let mut tables =
            Tables::adopt(&mut adoption, &records, &shared, &pool, store.is_some(), interrupted)?;
        let common = adoption.finish()?;
        for of_chain in records.chunk_by(|(_, a), (_, b)| a.chain == b.chain) {
            tables.empty_older_duplicates(of_chain);
        }
        let settled = tables.settle()?;
        pool.rebuild(tables.words()).map_err(|error| AdoptError::Damaged(error.to_string()))?;
        if let Some(store) = &store {
            tables.rebuild_store(store, &settled)?;
        }
        let trained = redo.dictionary(PRIORITIES).filter(|_| config.auto_recompress.is_some());
        let trained = trained.map(auto::trained_streams).transpose().map_err(SetupError::from)?;
        let redo = Some(redo.adopt()?);
        let groups = tables.take_groups(store.clone(), &settled)?;
        let shared = tables.take_shared(config.auto_dedup.is_some(), &settled);
        let memory = Memory { common, pool, redo, store, groups, shared, trained, is_new: false };
        let family = Family::start(FamilyParts::with_memory(config, memory)?)?;
        if !bases.is_empty() {
            family.0.pages.keeper.start_over_base().map_err(SetupError::Thread)?;
        }
        // Until here the process can be killed, or fail, and another one can adopt the same files.
        family.0.pages.common.own_tables();
        let chains = family.adopt_layers(&records, &mut tables);
        let devices = family.adopt_devices(chains, bases);
        Ok((family, devices))
    }
}

impl Family {
    /// Returns the files of the family's memory, for a process that [adopts](FamilyMemory) the family;
    /// `None` if it is not [adoptable](Config::adoptable).
    pub fn files(&self) -> Option<FamilyFiles<BorrowedFd<'_>>> {
        let pages = &self.0.pages;
        let TableFiles { nodes, roots } = pages.common.files()?;
        Some(FamilyFiles {
            family: pages.redo.as_ref()?.file(),
            roots,
            nodes,
            pool: pages.pool.arena().file(),
            backing: self.0.config.backing.as_ref().and_then(|backing| Some(backing.file.as_ref()?.as_fd())),
        })
    }

    /// Stores a note of up to 4096 bytes for the process that adopts the family, such as the settings with
    /// which to do so. Returns false if the note is too long, or the family not adoptable. Must be called
    /// before another process has the [files](Self::files).
    pub fn set_note(&self, note: &[u8]) -> bool {
        self.0.pages.redo.as_ref().is_some_and(|redo| redo.set_note(note))
    }

    /// Returns a handle that does not keep the family alive.
    pub fn downgrade(&self) -> WeakFamily {
        WeakFamily(Arc::downgrade(&self.0))
    }

    /// Adds the adopted layers to the family. Returns their chains.
    fn adopt_layers(&self, records: &[(u32, LayerRecord)], tables: &mut Tables) -> Vec<AdoptedChain> {
        let layers = &self.0.pages.layers;
        let mut chains: Vec<AdoptedChain> = Vec::new();
        for (_, record) in records {
            let Some(table) = tables.take(record.id) else { continue };
            let layer = layers.adopt(table, Arc::new(Limits::default()));
            for (_, word) in words(layer.table()) {
                layer.account(layers, Word::EMPTY, word);
            }
            match chains.last_mut().filter(|_| record.chain != record.id) {
                Some(chain) => {
                    layers.join(&layer, record.chain);
                    chain.snapshots.push((*record, layer));
                }
                None => chains.push(AdoptedChain { origin: (*record, layer), snapshots: Vec::new() }),
            }
        }
        chains
    }

    /// Creates the devices of the chains, those that others read from first.
    fn adopt_devices(&self, mut chains: Vec<AdoptedChain>, bases: HashMap<u64, Base>) -> Vec<Adopted> {
        let mut parents: HashMap<_, _> =
            bases.into_iter().map(|(key, base)| (key, Parent::Device(base))).collect();
        parents.insert(0, Parent::Nothing);
        let mut devices = Vec::new();
        while !chains.is_empty() {
            let left = chains.len();
            for chain in std::mem::take(&mut chains) {
                match parents.get(&chain.origin.0.parent).cloned() {
                    Some(parent) => self.adopt_chain(chain, parent, &mut parents, &mut devices),
                    None => chains.push(chain),
                }
            }
            assert!(chains.len() < left, "checked by `find_bases`");
        }
        devices
    }

    fn adopt_chain(
        &self,
        adopted: AdoptedChain,
        parent: Parent,
        parents: &mut HashMap<u64, Parent>,
        devices: &mut Vec<Adopted>,
    ) {
        let AdoptedChain { origin: (of, origin), snapshots } = adopted;
        let members = snapshots.iter().map(|(of, layer)| (of.number, Arc::clone(layer))).collect();
        let chain = Chain::with_snapshots(Arc::clone(&origin), members, parent.clone());
        if of.state == LayerState::Live {
            let ram = Ram::on_chain(&self.0, Arc::clone(&chain), parent, of.size, origin.shared_limits());
            devices.push(Adopted { key: of.key, ram });
        } else {
            origin.mark_unused(&self.0.pages.layers);
        }
        for (of, layer) in snapshots {
            let view = Chain::snapshot_view(&chain, layer, of.number);
            let ram = Ram::on_snapshot(&self.0, view, of.size);
            // The removal of another one continues when it is dropped here.
            if of.state == LayerState::Snapshot {
                parents.entry(of.key).or_insert_with(|| Parent::Snapshot(ram.clone()));
                devices.push(Adopted { key: of.key, ram });
            }
        }
    }
}

impl Ram {
    /// Records keys that identify this device, and the device that it reads from, for a process that
    /// [adopts](FamilyMemory::adopt) the family. Keys are chosen by the caller, and not 0; `base` is 0 for a device
    /// that reads from no other. A fork of a snapshot of its own family has the snapshot's key as `base`.
    pub fn set_keys(&self, key: u64, base: u64) {
        let _one = self.0.changing.lock();
        // The origin of a snapshot was perhaps removed, or rewound, before it had keys.
        record::set_parent_of_unnamed(self.0.chain.get().origin().table(), base);
        record::set_keys(self.0.layer().table(), key, base);
    }

    /// As [`set_keys`](Self::set_keys), with the key of another device of the family, which this one replaces.
    /// If the process is killed before the former device is dropped, only this one is adopted. Does nothing if
    /// the other device has no key.
    pub fn succeed(&self, former: &Self, key: u64, base: u64) {
        let former = record::read(former.0.layer().table()).filter(|former| former.key != 0);
        if let Some(former) = former {
            record::set_rewinds(self.0.layer().table(), former.rewinds + 1);
            self.set_keys(key, base);
        }
    }
}

/// Returns the records of layers that are in use, by chain, with the origin first and the oldest snapshot
/// next.
fn used_records(all: Vec<(u32, [u64; 8])>) -> Result<Vec<(u32, LayerRecord)>, AdoptError> {
    let damaged = |root: u32| AdoptError::Damaged(format!("slot table {root} has no valid record"));
    let mut records = Vec::new();
    for (root, words) in all.into_iter().filter(|(_, words)| SharedTable::decode(words).is_none()) {
        let record = LayerRecord::decode(&words).filter(|record| record.id < LAYER_IDS);
        let record = record.ok_or_else(|| damaged(root))?;
        if record.state != LayerState::Retired {
            records.push((root, record));
        }
    }
    // A rewind was interrupted: the layer with fewer rewinds is the former one.
    let mut newest: HashMap<u64, u64> = HashMap::new();
    let is_live = |record: &LayerRecord| record.state == LayerState::Live && record.key != 0;
    for (_, record) in records.iter().filter(|(_, record)| is_live(record)) {
        let rewinds = newest.entry(record.key).or_default();
        *rewinds = record.rewinds.max(*rewinds);
    }
    for (_, record) in &mut records {
        if is_live(record) && newest.get(&record.key).is_some_and(|rewinds| *rewinds > record.rewinds) {
            record.state = LayerState::Loose;
        }
    }
    let is_origin = |record: &LayerRecord| record.chain == record.id;
    records.sort_by_key(|(_, record)| (record.chain, !is_origin(record), record.number));
    let (mut used, mut ids) = (Vec::new(), HashSet::new());
    if let Some((root, _)) = records.iter().find(|(_, record)| !ids.insert(record.id)) {
        return Err(damaged(*root));
    }
    for chain in records.chunk_by(|(_, a), (_, b)| a.chain == b.chain) {
        let (root, origin) = chain[0];
        let is_repeated = chain.windows(2).any(|pair| {
            let [(_, a), (_, b)] = pair else { return false };
            is_origin(b) || !is_origin(a) && a.number == b.number
        });
        let is_wrong = |record: &LayerRecord| match record.state {
            LayerState::Live | LayerState::Loose => !is_origin(record),
            _ => is_origin(record),
        };
        if !is_origin(&origin) || is_repeated || chain.iter().any(|(_, record)| is_wrong(record)) {
            return Err(damaged(root));
        }
        // A former layer that no snapshot reads is unused.
        if origin.state == LayerState::Live || chain.len() > 1 {
            used.extend_from_slice(chain);
        }
    }
    Ok(used)
}

/// Returns the keys of snapshots, from which forks of the family read, and 0.
fn keys_inside(records: &[(u32, LayerRecord)]) -> HashSet<u64> {
    let snapshots = records.iter().filter(|(_, record)| record.state == LayerState::Snapshot);
    snapshots.map(|(_, record)| record.key).chain([0]).collect()
}

/// Returns the devices outside the family from which its devices read, by key. Checks that each device of
/// the family reads from one of these in the end, or from none.
fn find_bases(
    records: &[(u32, LayerRecord)],
    base: &mut dyn FnMut(u64) -> Option<Arc<dyn Device>>,
) -> Result<HashMap<u64, Base>, AdoptError> {
    let inside = keys_inside(records);
    let mut bases = HashMap::new();
    for key in records.iter().map(|(_, record)| record.parent).filter(|key| !inside.contains(key)) {
        if let Entry::Vacant(entry) = bases.entry(key) {
            entry.insert(Base::new(base(key).ok_or(AdoptError::NoBase(key))?));
        }
    }
    let parents: HashMap<_, _> = records.iter().map(|(_, record)| (record.key, record.parent)).collect();
    for (_, record) in records {
        let ancestors = std::iter::successors(Some(record.parent), |key| parents.get(key).copied());
        let mut ancestors = ancestors.take(BELOW_DEPTH_MAX as usize + 2);
        if !ancestors.any(|key| key == 0 || bases.contains_key(&key)) {
            return Err(AdoptError::Damaged("forks are based on one another".into()));
        }
    }
    Ok(bases)
}

#[cfg(test)]
#[path = "kill_tests.rs"]
mod kill_tests;
#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
