//! Takes over the page tables of a process that has ended, from their files.
//!
//! The process may have been killed at any moment. Its threads published each word, entry and record by one
//! atomic store, so all of them are whole. Waiters of locks, lists of free nodes and flights were in the heap,
//! and are gone. A node that no entry refers to is free.
//!
//! Nothing in the files is believed: an entry that refers to no node, or to the node of another entry, ends
//! the adoption.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::nodes::Nodes;
use super::root::Roots;
use super::table::{Common, LEAF_SLOTS, ROOT_ENTRIES, SAME_FILLED_LEAF, Table};
use super::word::Word;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::word_lock::{LOCK, WAITER, Word as _};

pub use super::root::RECORD_WORDS;

/// Reasons why page tables cannot be adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdoptionError {
    /// A file is not one of page tables, or cannot be mapped.
    File(rustix::io::Errno),
    /// The root with this number refers to a node that does not exist, or that has another user.
    Node(u32),
    /// The system has no memory.
    NoMemory,
}

/// Files of the page tables of a family.
#[derive(Debug)]
pub struct TableFiles<F> {
    /// File of directories and leaves.
    pub nodes: F,
    /// File of roots.
    pub roots: F,
}

/// Page tables that are being adopted.
pub struct Adoption {
    common: Arc<Common>,
    /// For each node, true if a table refers to it.
    is_node_used: Vec<bool>,
    used_roots: Vec<u32>,
}

impl Common {
    /// Creates the state for a new family whose tables another process can adopt.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)`.
    pub fn adoptable() -> rustix::io::Result<Self> {
        Ok(Self::with(Nodes::new()?, Some(Roots::new()?)))
    }

    /// Returns the files for a process that adopts the tables; `None` if no process can.
    pub fn files(&self) -> Option<TableFiles<BorrowedFd<'_>>> {
        let roots = self.roots.as_ref()?.arena().file();
        Some(TableFiles { nodes: self.nodes.arena().file(), roots })
    }

    /// Completes an adoption. Until then, tables that are dropped stay in their files, for another process.
    pub fn own_tables(&self) {
        // Relaxed: tables are handed to other threads later.
        self.leaves_tables.store(0, Ordering::Relaxed);
    }
}

impl Adoption {
    /// Maps the files of a process that has ended.
    ///
    /// # Errors
    /// Fails if a file is unusable, or memory is short.
    pub fn begin(files: TableFiles<OwnedFd>) -> Result<Self, AdoptionError> {
        let nodes = Nodes::adopt(files.nodes).map_err(AdoptionError::File)?;
        let roots = Roots::adopt(files.roots).map_err(AdoptionError::File)?;
        let count = nodes.arena().units_ever_allocated() as usize;
        let mut is_node_used = Vec::new();
        is_node_used.try_reserve_exact(count).map_err(|_| AdoptionError::NoMemory)?;
        is_node_used.resize(count, false);
        let common = Common::with(nodes, Some(roots));
        // Relaxed: no other thread uses it yet.
        common.leaves_tables.store(1, Ordering::Relaxed);
        Ok(Self { common: Arc::new(common), is_node_used, used_roots: Vec::new() })
    }

    /// Returns the state of the family. No table may be created before the [end](Self::finish).
    pub const fn common(&self) -> &Arc<Common> {
        &self.common
    }

    /// Returns the numbers of all roots in use, with their records.
    ///
    /// # Errors
    /// [`AdoptionError::File`].
    pub fn records(&self) -> Result<Vec<(u32, [u64; RECORD_WORDS])>, AdoptionError> {
        let roots = self.roots();
        let records = roots.present().map_err(AdoptionError::File)?.into_iter().map(|unit| {
            // Acquire: the fields of a record were stored before its first word.
            let first = roots.record(unit)[0].load(Ordering::Acquire);
            // Relaxed: see above.
            let mut record = roots.record(unit).each_ref().map(|word| word.load(Ordering::Relaxed));
            record[0] = first;
            (unit, record)
        });
        Ok(records.filter(|(_, record)| record[0] != 0).collect())
    }

    /// Adopts the table with the root `unit`. `mend` returns the word that a slot shall have; it receives the
    /// slot, its word, and true if the dead process had locked it.
    ///
    /// # Errors
    /// [`AdoptionError::Node`] if the table is damaged.
    pub fn table(
        &mut self,
        unit: u32,
        id: u32,
        mut mend: impl FnMut(u64, Word, bool) -> Word,
    ) -> Result<Table, AdoptionError> {
        let Self { common, is_node_used, .. } = self;
        let roots = roots_of(common);
        let (root, nodes) = (roots.root(unit, ROOT_ENTRIES), &common.nodes);
        let mut node_of = |entry: &AtomicU64| {
            // Relaxed: the process that stored the entry has ended.
            let number = (entry.load(Ordering::Relaxed) & !SAME_FILLED_LEAF).checked_sub(1)?;
            let is_used = usize::try_from(number).ok().and_then(|number| is_node_used.get_mut(number));
            Some(match is_used.filter(|is_used| !**is_used) {
                Some(is_used) => {
                    *is_used = true;
                    Ok(nodes.get(number as u32))
                }
                None => Err(AdoptionError::Node(unit)),
            })
        };
        let (mut end, mut same_filled) = (0, 0);
        let present = roots.present_entries(unit, ROOT_ENTRIES).map_err(AdoptionError::File)?;
        for index in present.into_iter().flatten() {
            let Some(directory) = node_of(&root[index]).transpose()? else { continue };
            end = index as u64 + 1;
            for (number, entry) in (index as u64 * LEAF_SLOTS..).zip(directory) {
                let Some(leaf) = node_of(entry).transpose()? else { continue };
                // Relaxed: as above.
                same_filled += entry.load(Ordering::Relaxed) >> SAME_FILLED_LEAF.trailing_zeros();
                for (slot, place) in (number * LEAF_SLOTS..).zip(leaf) {
                    // Relaxed: as above.
                    let bits = place.load(Ordering::Relaxed);
                    let word = Word::from_bits(bits & !(LOCK | WAITER));
                    let mended = mend(slot, word, bits & LOCK != 0).bits();
                    if mended != bits {
                        // Relaxed: no other thread uses the table yet.
                        place.store(mended, Ordering::Relaxed);
                    }
                }
            }
        }
        // Relaxed: a counter, which orders no other data.
        common.same_filled_leaves.fetch_add(same_filled, Ordering::Relaxed);
        self.used_roots.push(unit);
        Ok(Table::with(id, root, end, Arc::clone(common)))
    }

    /// Frees the nodes and roots that no adopted table uses.
    ///
    /// # Errors
    /// [`AdoptionError::NoMemory`].
    pub fn finish(mut self) -> Result<Arc<Common>, AdoptionError> {
        self.used_roots.sort_unstable();
        let used = (0..).zip(&self.is_node_used).filter(|(_, is_used)| **is_used).map(|(node, _)| node);
        let used: Vec<u32> = used.collect();
        self.common.nodes.keep(&used).map_err(|_| AdoptionError::NoMemory)?;
        self.roots().keep(&self.used_roots).map_err(|_| AdoptionError::NoMemory)?;
        Ok(self.common)
    }

    fn roots(&self) -> &Roots {
        roots_of(&self.common)
    }
}

fn roots_of(common: &Common) -> &Roots {
    let Some(roots) = &common.roots else { unreachable!("adopted tables have roots in a file") };
    roots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::{Flights, Kind, MAX_SLOTS};

    fn clone_files(common: &Common) -> TableFiles<OwnedFd> {
        let files = common.files().unwrap();
        let clone = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
        TableFiles { nodes: clone(files.nodes), roots: clone(files.roots) }
    }

    fn record(table: &Table, word: u64) {
        // Release: as the owner of a table does.
        table.record().unwrap()[0].store(word, Ordering::Release);
    }

    /// The first process is killed while it holds locks and reads a page. Here its tables are dropped last, and
    /// find no node to free.
    #[test]
    fn adopted_table_has_words_without_locks() {
        let common = Arc::new(Common::adoptable().unwrap());
        let tables: Vec<_> = (0..3).map(|id| Table::new(id, Arc::clone(&common)).unwrap()).collect();
        let slots = [0, 511, 1 << 20, MAX_SLOTS - 1];
        for (table, n) in tables.iter().zip(1..) {
            for (slot, pattern) in slots.into_iter().zip(n * 10..) {
                table.leaf_or_new(slot).unwrap().lock(slot).publish(Word::same(pattern));
            }
            record(table, u64::from(n));
        }
        let flights = Flights::<()>::default();
        let spilled = tables[0].leaf(0).unwrap().lock(0);
        spilled.publish(Word::spilled(77, 100, 2));
        flights.depart(tables[0].leaf(0).unwrap().lock(0), 0, Vec::new());
        std::mem::forget(tables[0].leaf(511).unwrap().lock(511));
        tables[2].same_filled_leaf(2 << 20).unwrap();
        let files = clone_files(&common);
        let mut adoption = Adoption::begin(files).unwrap();
        let records = adoption.records().unwrap();
        assert_eq!(
            records.iter().map(|(unit, record)| (*unit, record[0])).collect::<Vec<_>>(),
            [(0, 1), (1, 2), (2, 3)]
        );
        // The second table is not adopted.
        let mut seen = Vec::new();
        let adopted = [0, 2].map(|unit| {
            let mend = |slot, word: Word, is_locked: bool| {
                assert_eq!(is_locked, unit == 0 && slot == 511);
                seen.extend((word != Word::EMPTY).then_some(slot));
                word
            };
            adoption.table(unit, unit + 5, mend).unwrap()
        });
        assert_eq!(seen, [slots, slots].concat());
        let common = adoption.finish().unwrap();
        common.own_tables();
        let word = adopted[0].leaf(0).unwrap().peek(0);
        assert_eq!((word.kind(), word.location()), (Kind::InFlight, 77));
        for (table, first) in adopted.iter().zip([10, 30]) {
            for (slot, pattern) in slots.into_iter().zip(first..).skip(1) {
                assert_eq!(table.leaf(slot).unwrap().lock(slot).word(), Word::same(pattern));
            }
        }
        // Relaxed: no other thread.
        assert_eq!(common.same_filled_leaves.load(Ordering::Relaxed), 1);
        // Nodes of the second table are free: nothing new is needed for as many.
        let before = common.nodes.arena().units_ever_allocated();
        let table = Table::new(9, Arc::clone(&common)).unwrap();
        for slot in slots {
            assert_eq!(table.leaf_or_new(slot).unwrap().peek(slot), Word::EMPTY);
        }
        assert_eq!(common.nodes.arena().units_ever_allocated(), before);
    }

    #[test]
    fn damaged_table_is_refused() {
        for bad in [3_u64, u64::from(u32::MAX), SAME_FILLED_LEAF - 1, SAME_FILLED_LEAF | 2] {
            let common = Arc::new(Common::adoptable().unwrap());
            let table = Table::new(0, Arc::clone(&common)).unwrap();
            table.leaf_or_new(0).unwrap();
            record(&table, 1);
            // Nodes 1 and 2 are the directory and the leaf; no node 3 exists, and node 2 has a user.
            // Relaxed: no other thread.
            table.root[1].store(bad, Ordering::Relaxed);
            let mut adoption = Adoption::begin(clone_files(&common)).unwrap();
            assert_eq!(
                adoption.table(0, 0, |_, word, _| word).err(),
                Some(AdoptionError::Node(0)),
                "{bad:#x}"
            );
            // Relaxed: no other thread.
            table.root[1].store(0, Ordering::Relaxed);
        }
        let other = rustix::fs::memfd_create("freestone-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&other, 100).unwrap();
        let files = TableFiles { nodes: other.try_clone().unwrap(), roots: other };
        assert!(matches!(Adoption::begin(files), Err(AdoptionError::File(_))));
    }
}
