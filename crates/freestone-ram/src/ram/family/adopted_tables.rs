//! The slot tables of an adopted family: which words the former process can have left.
//!
//! The tables of groups and of shared objects are settled by the words of pages, which are never behind them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::adopt_error::AdoptError;
use crate::pool::redo::Interrupted;
use crate::pool::{BackRef, Pool};
use crate::ram::memory::config::SetupError;
use crate::ram::memory::groups::adopt::{DamagedGroup, GroupUsers};
use crate::ram::memory::groups::{self, Groups};
use crate::ram::memory::record::{LayerRecord, SharedTable};
use crate::ram::memory::shared::{self, ObjectUsers, SharedObjects};
use freestone_core::slot::adoption::Adoption;
use freestone_core::slot::{Kind, LEAF_SLOTS, Table, Word};
use freestone_spill::layout::Place;
use freestone_spill::store::Store;

/// Adopted slot tables.
#[derive(Default)]
pub(super) struct Tables {
    /// Tables of layers by id.
    layers: BTreeMap<u32, Table>,
    /// Headers and pieces of groups, and the places of groups.
    groups: Option<(Table, Table)>,
    shared: Option<Table>,
}

/// Tables of groups and of shared objects, with their users.
pub(super) struct Settled {
    groups: Option<GroupUsers>,
    shared: Option<ObjectUsers>,
}

fn damaged(why: impl Into<String>) -> AdoptError {
    AdoptError::Damaged(why.into())
}

fn damaged_group(DamagedGroup(group): DamagedGroup) -> AdoptError {
    damaged(format!("group {group} is not as its pages need it"))
}

fn damaged_object(number: u64) -> AdoptError {
    damaged(format!("shared object {number} does not exist"))
}

impl Tables {
    /// Adopts the slot tables of the records, and completes interrupted copies. `has_store`: the family has a
    /// backing device.
    pub fn adopt(
        adoption: &mut Adoption,
        records: &[(u32, LayerRecord)],
        shared: &[(u32, SharedTable)],
        pool: &Pool,
        has_store: bool,
        interrupted: Vec<Interrupted>,
    ) -> Result<Self, AdoptError> {
        let copies: HashMap<_, _> = interrupted.into_iter().map(|copy| (copy.owner.bits(), copy)).collect();
        let mut tables = Self::default();
        for (root, record) in records {
            let mut unknown = None;
            let table = adoption.table(*root, record.id, |slot, word, is_locked| {
                let copy = copies.get(&BackRef::new(record.id, slot).bits()).filter(|_| is_locked);
                let word = match copy {
                    Some(copy) if pool.complete_overwrite(word, copy.word, &copy.object) => copy.word,
                    _ => word,
                };
                let word = if word.kind() == Kind::InFlight { word.before_flight() } else { word };
                match word.kind() {
                    Kind::Empty | Kind::Base => word,
                    Kind::Same | Kind::Pattern | Kind::Compressed | Kind::Huge => {
                        word.with_idle(false).unpicked(0)
                    }
                    Kind::Spilled if has_store => word.unpicked(0),
                    Kind::Grouped => word.with_idle(false).unpicked(0),
                    Kind::InFlight | Kind::Spilled => {
                        unknown = Some(slot);
                        word
                    }
                }
            })?;
            tables.layers.insert(record.id, table);
            if let Some(slot) = unknown {
                return Err(damaged(format!("slot {slot} of table {root} has an unknown word")));
            }
        }
        tables.adopt_shared(adoption, shared)?;
        Ok(tables)
    }

    /// Adopts the tables that no layer has.
    fn adopt_shared(
        &mut self,
        adoption: &mut Adoption,
        records: &[(u32, SharedTable)],
    ) -> Result<(), AdoptError> {
        let mut adopt = |wanted, id| {
            let root = records.iter().find(|(_, purpose)| *purpose == wanted).map(|(root, _)| *root);
            root.map(|root| adoption.table(root, id, |_, word, _| word)).transpose()
        };
        self.shared = adopt(SharedTable::SharedObjects, shared::TABLE_ID)?;
        let pieces = adopt(SharedTable::GroupPieces, groups::TABLE_ID)?;
        // A table is missing if the first group was just being formed.
        self.groups = pieces.zip(adopt(SharedTable::GroupPlaces, groups::TABLE_ID)?);
        Ok(())
    }

    /// Counts the users of groups and shared objects, and frees those without users.
    pub fn settle(&self) -> Result<Settled, AdoptError> {
        let mut groups = self.groups.as_ref().map(|(pieces, _)| GroupUsers::new(pieces));
        let mut shared = self.shared.as_ref().map(ObjectUsers::new);
        for (_, word) in self.layer_words() {
            if word.is_shared() {
                let is_there = shared.as_mut().is_some_and(|shared| shared.count(word));
                is_there.then_some(()).ok_or_else(|| damaged_object(word.shared_number()))?;
            } else if word.is_grouped() || word.is_spilled_in_group() {
                let groups =
                    groups.as_mut().ok_or_else(|| damaged("a page is in a group, and there is none"))?;
                groups.count(word).map_err(damaged_group)?;
            }
        }
        if let (Some(users), Some((pieces, places))) = (&groups, &self.groups) {
            users.settle(pieces, places).map_err(damaged_group)?;
        }
        if let (Some(users), Some(table)) = (&shared, &self.shared) {
            users.settle(table).map_err(damaged_object)?;
        }
        Ok(Settled { groups, shared })
    }

    /// Marks the space of all pages and groups on the backing device as used.
    pub fn rebuild_store(&self, store: &Store, settled: &Settled) -> Result<(), AdoptError> {
        let lone = |word: &Word| word.kind() == Kind::Spilled && !word.is_spilled_in_group();
        let pages =
            self.layer_words().map(|(_, word)| word).filter(lone).map(Place::of).map(|place| (place, 1));
        let groups =
            settled.groups.iter().zip(&self.groups).flat_map(|(users, (_, places))| users.places(places));
        for (Place { unit, stored, .. }, pages) in pages.chain(groups.map(|place| (place, 0))) {
            if !store.adopt_object(unit, stored as usize, pages) {
                return Err(damaged(format!("no object can be in unit {unit} of the backing device")));
            }
        }
        Ok(())
    }

    /// Returns the groups, if the family has some.
    ///
    /// # Errors
    /// Fails if memory is short.
    pub fn take_groups(
        &mut self,
        store: Option<Arc<Store>>,
        settled: &Settled,
    ) -> Result<Option<Groups>, AdoptError> {
        let Some((users, (pieces, places))) = settled.groups.as_ref().zip(self.groups.take()) else {
            return Ok(None);
        };
        let groups = Groups::adopt(pieces, places, store, users);
        groups.map(Some).map_err(|_| SetupError::NoMemory.into())
    }

    /// Returns the shared objects, if the family has some.
    pub fn take_shared(&mut self, is_automatic: bool, settled: &Settled) -> Option<SharedObjects> {
        let (users, table) = settled.shared.as_ref().zip(self.shared.take())?;
        Some(SharedObjects::adopt(table, is_automatic, users))
    }

    /// Returns all slots with objects in the pool.
    pub fn words(&self) -> impl Iterator<Item = (BackRef, Word)> {
        let pieces = self.groups.iter().map(|(pieces, _)| pieces);
        self.layers.values().chain(pieces).chain(&self.shared).flat_map(words)
    }

    fn layer_words(&self) -> impl Iterator<Item = (BackRef, Word)> {
        self.layers.values().flat_map(words)
    }

    /// Removes and returns the table of a layer.
    pub fn take(&mut self, id: u32) -> Option<Table> {
        self.layers.remove(&id)
    }

    /// Empties slots of snapshots whose object a younger layer of the chain has, too.
    pub fn empty_older_duplicates(&self, of_chain: &[(u32, LayerRecord)]) {
        let of_chain: Vec<_> =
            of_chain.iter().filter_map(|(_, record)| self.layers.get(&record.id)).collect();
        let [origin, snapshots @ ..] = &of_chain[..] else { return };
        for (index, older) in snapshots.iter().enumerate() {
            let younger = || snapshots[index + 1..].iter().chain([origin]);
            for (owner, word) in words(older).filter(|(_, word)| object(*word).is_some()) {
                let slot = owner.slot();
                let has_object = |table: &&Table| {
                    table.leaf(slot).is_some_and(|leaf| object(leaf.peek(slot)) == object(word))
                };
                if younger().any(has_object)
                    && let Some(leaf) = older.leaf(slot)
                {
                    leaf.lock(slot).publish(Word::EMPTY);
                }
            }
        }
    }
}

/// Returns the location of an object that one page has, and true if it is on the backing device.
fn object(word: Word) -> Option<(u64, bool)> {
    match word.kind() {
        Kind::Spilled if word.is_spilled_in_group() => None,
        Kind::Spilled => Some((word.location(), true)),
        _ => word.object().map(|location| (location, false)),
    }
}

/// Returns all slots of a table that are not empty.
pub(super) fn words(table: &Table) -> impl Iterator<Item = (BackRef, Word)> {
    let mut from = 0;
    let leaves = std::iter::from_fn(move || {
        let start = table.next_present(from, freestone_core::slot::MAX_SLOTS)? & !(LEAF_SLOTS - 1);
        from = start + LEAF_SLOTS;
        Some(start)
    });
    let of_leaf = move |start: u64| {
        let leaf = table.leaf(start);
        (start..start + LEAF_SLOTS).filter_map(move |slot| {
            let word = leaf.as_ref()?.peek(slot);
            (word != Word::EMPTY).then(|| (BackRef::new(table.id(), slot), word))
        })
    };
    leaves.flat_map(of_leaf)
}
