//! Groups: neighbouring pages that are compressed together, which takes less memory than each page
//! alone.
//!
//! # Storage
//! * In memory, the object of a group is stored in *pieces*, each an object of the pool. The slots of
//!   a table of its own refer to the pieces. So compaction moves pieces as it moves pages, by their
//!   back-references. No layer has this table: passes over the pages of devices do not see the
//!   pieces.
//! * Group `n` has the slots from `n * GROUP_SLOTS` on. The first is the [`Header`], which counts the
//!   users of the group; the others refer to the pieces. A group without users has no pieces, and
//!   its number is reused.
//! * The word of a page in a group ([`Word::grouped`]) states the group's number and the position
//!   of the page in the group. The word can move to another table, as every word. The page's owner
//!   is charged for a share of the group's bytes.
//! * On the backing device, the object is one object of the packed layout, whose owner is the header.
//!   The word of a page of a spilled group ([`Word::spilled_in_group`]) states the same as in memory,
//!   and its owner is charged for nothing. Slot `n` of a second table has the place of the object.
//!
//! # Life of a group
//! [`create`](Groups::create) stores the pieces before any word refers to them. Its caller is a
//! user until [`finish`](Groups::finish), so the group lives while the words are published. A
//! thread that removes a word from the last slot calls [`leave`](Groups::leave). The content never
//! changes.
//!
//! The pages of a group can be in memory, on the device, or some here and some there. The pieces
//! exist while a word refers to the group in memory, and the object on the device exists while a word
//! refers to the group there. The last user of a kind frees the pieces or the object. A page moves
//! by a change of its word: to the device by [`spill`](Groups::spill), to memory by
//! [`enter`](Groups::enter). If all pages return to memory, the object stays on the device as the
//! [clean copy](freestone_spill::clean_copies) of the header's slot.
//!
//! The tables keep their leaves until the family ends, and reuse them. A process that [adopts](adopt) the
//! family counts the users of each group again.
//!
//! A group frees no memory before its last page has left.
//! [`recompress::groups`](crate::ram::recompress::groups) forms groups, and takes the pages out of
//! those that have lost half of their pages.
//!
//! # Reads
//! While the slot of a page in a group is locked, the page is a user, and so the pieces exist. A
//! CPU's reader keeps its group decompressed up to the last page that was read, so reads of
//! successive pages decompress each page once.
//!
//! Lock order: the slot of a page, a reader, a header, a piece or a place (one at a time), the pool's
//! locks. `numbers` and the locks of the [`Store`] are leaf locks.

use std::sync::Arc;

pub(in crate::ram) mod adopt;
pub(in crate::ram) mod device;
mod header;
pub(in crate::ram) mod object_reader;
mod read;

use self::device::{clean_copy, place_in};
use self::header::{Header, HeaderGuard};
use self::object_reader::ObjectReader;
use self::read::Reader;
use super::record::SharedTable;
use crate::codec::{GROUP_PAGES, Scratch};
use crate::pool::backrefs::MAX_TABLE_ID;
use crate::pool::class::CLASS_STEP_BYTES;
use crate::pool::{BackRef, Pool};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu::{self, Counters, PerCpu};
use freestone_core::slot::{Common, LEAF_SLOTS, Leaf, SlotGuard, Table, Word};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};
use freestone_spill::blocks;
use freestone_spill::store::Store;

/// Table id of the pieces. Layers have smaller ids.
pub(in crate::ram) const TABLE_ID: u32 = MAX_TABLE_ID;
/// Number of slots for each group: a header, and the pieces. Also the number of positions in a
/// group.
const GROUP_SLOTS: u64 = 8;
/// Largest object of a group, in bytes. Pages whose group is larger stay alone.
pub(in crate::ram) const OBJECT_BYTES_MAX: usize = PIECES_MAX * PIECE_BYTES;
/// Largest number of pieces of a group.
const PIECES_MAX: usize = GROUP_SLOTS as usize - 1;
/// Largest piece, in bytes: the largest object that wastes no memory of the pool.
const PIECE_BYTES: usize = Scratch::BYTES;
/// Rounding of shares in bytes: devices are charged in steps of the pool's size classes.
const SHARE_STEP_BYTES: u64 = CLASS_STEP_BYTES as u64;
const _: () = assert!(LEAF_SLOTS.is_multiple_of(GROUP_SLOTS) && GROUP_PAGES as u64 <= GROUP_SLOTS);
const _: () = assert!(OBJECT_BYTES_MAX <= blocks::OBJECT_BYTES_MAX);

/// Indices of the counters.
mod counter {
    pub const GROUPS: usize = 0;
    pub const PAGES: usize = 1;
    pub const BYTES: usize = 2;
    pub const SPILLED_PAGES: usize = 3;
    pub const COUNT: usize = 4;
}

/// The groups of a family (devices that share a memory pool).
pub(in crate::ram) struct Groups {
    pieces: Table,
    /// Places of the objects on the backing device, by group. A slot changes under the lock of the
    /// group's header only.
    places: Table,
    store: Option<Arc<Store>>,
    numbers: Mutex<Numbers>,
    readers: PerCpu<Mutex<Reader>>,
    /// Group in the reader of each CPU, as number plus one; 0 if there is none. Stored by the
    /// holder of the reader, except that the thread that frees a group resets the value.
    in_reader: Box<[AtomicU64]>,
    counters: Counters<{ counter::COUNT }>,
}

/// Numbers for new groups.
#[derive(Default)]
struct Numbers {
    free: Vec<u64>,
    next: u64,
    /// Number of leaves of the table of places.
    place_leaves: u64,
}

/// Current sizes of a family's groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::ram) struct GroupSizes {
    pub groups: u64,
    /// Number of pages in groups in memory.
    pub pages: u64,
    /// Bytes of pool memory of the pieces.
    pub bytes: u64,
    /// Number of pages whose group is on the backing device.
    pub spilled_pages: u64,
    /// Bytes of the slot tables.
    pub table_bytes: u64,
}

/// Returns the bytes of pool memory of an object of `bytes` bytes that is stored in pieces.
pub(in crate::ram) fn charged_bytes(bytes: usize) -> u64 {
    let (whole, rest) = (bytes / PIECE_BYTES, bytes % PIECE_BYTES);
    whole as u64 * Pool::charged_bytes(PIECE_BYTES) + if rest > 0 { Pool::charged_bytes(rest) } else { 0 }
}

/// Returns the share of the page at `position` among `pages` pages in `charged` bytes of pool memory,
/// at least [`SHARE_STEP_BYTES`].
pub(in crate::ram) fn share(charged: u64, pages: usize, position: usize) -> u32 {
    let (steps, pages) = (charged / SHARE_STEP_BYTES, pages as u64);
    let share = steps / pages + u64::from((position as u64) < steps % pages);
    (share.max(1) * SHARE_STEP_BYTES) as u32
}

/// Returns true if both words are of pages of one group.
pub(in crate::ram) fn is_same_group(a: Word, b: Word) -> bool {
    let has_group = |word: Word| word.is_grouped() || word.is_spilled_in_group();
    has_group(a) && has_group(b) && group_of(a) == group_of(b)
}

/// Returns the owner in the header of a spilled group's object, for the word of a page of the group.
pub(in crate::ram) fn owner_of(word: Word) -> BackRef {
    header_of(group_of(word))
}

/// Returns the position of a page in its group.
pub(in crate::ram) fn position_of(word: Word) -> usize {
    (word.location() % GROUP_SLOTS) as usize
}

fn group_of(word: Word) -> u64 {
    debug_assert!(word.is_grouped() || word.is_spilled_in_group());
    word.location() / GROUP_SLOTS
}

fn header_of(group: u64) -> BackRef {
    BackRef::new(TABLE_ID, group * GROUP_SLOTS)
}

impl Groups {
    /// Creates the groups of a family with this backing device.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if memory is short.
    pub fn new(common: &Arc<Common>, store: Option<Arc<Store>>) -> Result<Self> {
        let table = || Table::new(TABLE_ID, Arc::clone(common));
        Self::with(table()?, table()?, store)
    }

    /// Records the purpose of the tables for a process that adopts the family. Called before a page is in a
    /// group.
    pub fn record(&self) {
        SharedTable::GroupPieces.record(&self.pieces);
        SharedTable::GroupPlaces.record(&self.places);
    }

    fn with(pieces: Table, places: Table, store: Option<Arc<Store>>) -> Result<Self> {
        let mut cpus = 0..;
        let reader = || {
            let cpu = cpus.next().unwrap_or_default();
            Ok(Mutex::new(Reader { cpu, object: None }))
        };
        Ok(Self {
            pieces,
            places,
            store,
            numbers: Mutex::default(),
            readers: PerCpu::try_new(reader)?,
            in_reader: (0..percpu::cpus()).map(|_| AtomicU64::new(0)).collect(),
            counters: Counters::default(),
        })
    }

    // ---- life of a group --------------------------------------------------------------------------

    /// Stores the object of a group of `pages` pages, at most [`OBJECT_BYTES_MAX`] bytes, and
    /// returns the group's number. `reserved` pages of the pool are left to others. The caller must
    /// publish the words of the pages, and then call [`finish`](Self::finish).
    ///
    /// # Errors
    /// As [`Pool::store`]. Nothing is stored then.
    pub fn create(&self, pool: &Pool, object: &[u8], pages: u32, reserved: u64) -> Result<u64> {
        let number = self.take_number().ok_or(Error::NoMemory)?;
        let first = number * GROUP_SLOTS;
        let stored = self.pieces.leaf_or_new(first).and_then(|leaf| {
            let pieces = store_pieces(pool, object, first, reserved)?;
            Ok((leaf, pieces))
        });
        let (leaf, pieces) = stored.inspect_err(|_| self.numbers.lock().free.push(number))?;
        publish_pieces(leaf, first, object, &pieces);
        let header =
            Header { in_memory: pages + 1, on_device: 0, pieces: pieces_of(object.len()) as u32, pages };
        leaf.lock(first).publish(header.word());
        kill_points::pass(KillPoint::GroupStored);
        self.counters.add(counter::GROUPS, 1);
        self.counters.add(counter::PAGES, i64::from(pages));
        self.counters.add(counter::BYTES, charged_bytes(object.len()) as i64);
        Ok(number)
    }

    /// Returns the word of the page at `position` in a group, which is charged for `share` bytes.
    pub fn word(group: u64, position: usize, share: u32) -> Word {
        Word::grouped(group * GROUP_SLOTS + position as u64, share)
    }

    /// Ends the creation of a group. `missing` of its pages were not published.
    pub fn finish(&self, pool: &Pool, group: u64, missing: u32) {
        self.counters.add(counter::PAGES, -i64::from(missing));
        self.remove_users(pool, group, (missing + 1, 0), None);
    }

    /// Removes a page, whose word is in no slot any more, from its group.
    pub fn leave(&self, pool: &Pool, word: Word) {
        self.leave_with(pool, word, None);
    }

    /// As [`leave`](Self::leave), for a page that returned to memory. If it was the last page on the
    /// device, the group's `object`, if given, stays there as a clean copy.
    pub fn leave_device(&self, pool: &Pool, word: Word, object: Option<&[u8]>) {
        self.leave_with(pool, word, object);
    }

    fn leave_with(&self, pool: &Pool, word: Word, object: Option<&[u8]>) {
        let users = if word.is_grouped() {
            self.counters.add(counter::PAGES, -1);
            (1, 0)
        } else {
            self.count_spilled(-1);
            (0, 1)
        };
        self.remove_users(pool, group_of(word), users, object);
    }

    fn remove_users(&self, pool: &Pool, group: u64, users: (u32, u32), object: Option<&[u8]>) {
        let (leaf, header) = self.lock_header(group);
        let is_unused = header.leave(users.0, users.1, |after, unused| {
            let forgets_page =
                users.0 > 0 && after.in_memory == 1 && mutants::on(Mutant::GroupForgetsLastPage);
            if unused.pieces || forgets_page {
                let bytes = free_pieces(pool, leaf, group * GROUP_SLOTS, u64::from(after.pieces));
                self.counters.add(counter::BYTES, -(bytes as i64));
            }
            let forgets_page =
                users.1 > 0 && after.on_device == 1 && mutants::on(Mutant::SpilledGroupForgetsPage);
            if unused.object || forgets_page {
                self.free_object(pool, group, object.filter(|_| after.in_memory > 0), after.in_memory);
            }
        });
        if is_unused {
            self.free_number(group);
        }
    }

    /// Frees the object of a group, whose header is locked, on the device; or keeps the `object` there
    /// as a clean copy of `pages` pages in memory.
    fn free_object(&self, pool: &Pool, group: u64, object: Option<&[u8]>, pages: u32) {
        let (Some(store), Some(place)) = (&self.store, self.place_of(group)) else { return };
        store.count_left(0, u64::from(place.stored));
        // Under the header's lock: the copy must not outlive the group.
        match object {
            Some(object) => {
                let (slot, content) = clean_copy(group, object);
                store.keep_object(slot, place.unit, pages, content, pool.pages());
            }
            None => store.free_object(place.unit, place.stored as usize),
        }
    }

    /// Frees the number of a group without users.
    fn free_number(&self, group: u64) {
        // Readers must not take the next group with this number for this one.
        for in_reader in &self.in_reader {
            let _ = in_reader.compare_exchange(group + 1, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
        if let Some(store) = &self.store {
            store.free_copy((TABLE_ID, group * GROUP_SLOTS));
        }
        self.counters.add(counter::GROUPS, -1);
        self.numbers.lock().free.push(group);
    }

    fn take_number(&self) -> Option<u64> {
        let mut numbers = self.numbers.lock();
        if let Some(number) = numbers.free.pop() {
            return Some(number);
        }
        let next = numbers.next;
        numbers.next += u64::from(next < Word::PLACES / GROUP_SLOTS);
        (next < numbers.next).then_some(next)
    }

    /// Locks the header of a group. Returns the leaf too, which has the group's pieces.
    fn lock_header(&self, group: u64) -> (Leaf<'_>, HeaderGuard<'_>) {
        let first = group * GROUP_SLOTS;
        let Some(leaf) = self.pieces.leaf(first) else { unreachable!("group {group} has no header") };
        (leaf, HeaderGuard::new(leaf.lock(first)))
    }

    fn peek_header(&self, group: u64) -> Option<Header> {
        let first = group * GROUP_SLOTS;
        self.pieces.leaf(first).map(|leaf| Header::of(leaf.peek(first)))
    }

    /// Returns true if a group has at most half of its pages in memory. The slot of the word is locked.
    pub fn is_sparse_in_memory(&self, word: Word) -> bool {
        self.peek_header(group_of(word)).is_some_and(Header::is_sparse_in_memory)
    }

    /// Returns true if a group has lost at least half of its pages. The slot of the word is locked,
    /// or in flight.
    pub fn is_sparse(&self, word: Word) -> bool {
        self.peek_header(group_of(word)).is_some_and(Header::is_sparse)
    }

    /// Locks and returns the slot of the piece that `owner` refers to; `None` if it is not a piece.
    pub fn piece_slot(&self, owner: BackRef) -> Option<SlotGuard<'_>> {
        let leaf = if owner.table() == TABLE_ID { self.pieces.leaf(owner.slot()) } else { None };
        leaf.map(|leaf| leaf.lock(owner.slot()))
    }

    // ---- statistics -------------------------------------------------------------------------------

    pub fn sizes(&self) -> GroupSizes {
        let get = |counter| self.counters.get(counter);
        let numbers = self.numbers.lock();
        // Leaves are allocated in order, and leaves and directories have the same number of entries.
        let nodes = |leaves: u64| leaves + leaves.div_ceil(LEAF_SLOTS);
        let leaves = (numbers.next * GROUP_SLOTS).div_ceil(LEAF_SLOTS);
        GroupSizes {
            groups: get(counter::GROUPS),
            pages: get(counter::PAGES),
            bytes: get(counter::BYTES),
            spilled_pages: get(counter::SPILLED_PAGES),
            table_bytes: (nodes(leaves) + nodes(numbers.place_leaves)) * PAGE_BYTES as u64,
        }
    }

    /// Returns the memory of the readers in bytes.
    pub fn reader_bytes(&self) -> u64 {
        let bytes = |reader: &Mutex<Reader>| reader.lock().object.as_ref().map_or(0, ObjectReader::bytes);
        self.readers.iter().map(|reader| bytes(reader) as u64).sum()
    }
}

/// Returns the size in bytes of the object of a group in memory, which has `pieces` pieces.
fn bytes_in(leaf: Leaf<'_>, group: u64, pieces: u32) -> usize {
    let last = leaf.peek(group * GROUP_SLOTS + u64::from(pieces)).stored_bytes();
    (pieces as usize - 1) * PIECE_BYTES + last
}

/// Returns the number of pieces of an object of `bytes` bytes.
fn pieces_of(bytes: usize) -> usize {
    bytes.div_ceil(PIECE_BYTES)
}

/// Stores the pieces of an object for the slots after the header `first`. Returns their locations in
/// the pool. No slot refers to the pieces yet.
fn store_pieces(pool: &Pool, object: &[u8], first: u64, reserved: u64) -> Result<[u64; PIECES_MAX]> {
    let mut locations = [0; PIECES_MAX];
    for (index, piece) in object.chunks(PIECE_BYTES).enumerate() {
        let owner = BackRef::new(TABLE_ID, first + 1 + index as u64);
        let stored = pool.store(piece, owner, reserved);
        locations[index] =
            stored.inspect_err(|_| locations[..index].iter().for_each(|&location| pool.free(location)))?;
    }
    Ok(locations)
}

/// Publishes the words of stored pieces in the slots after the header `first`.
fn publish_pieces(leaf: Leaf<'_>, first: u64, object: &[u8], locations: &[u64; PIECES_MAX]) {
    for ((slot, piece), &location) in (first + 1..).zip(object.chunks(PIECE_BYTES)).zip(locations) {
        leaf.lock(slot).publish(Word::compressed(location, piece.len() as u32, 0));
    }
}

/// Frees the `pieces` pieces of a group, whose header is locked. Returns the bytes of pool memory
/// that they used.
fn free_pieces(pool: &Pool, leaf: Leaf<'_>, first: u64, pieces: u64) -> u64 {
    let mut bytes = 0;
    for slot in first + 1..=first + pieces {
        let guard = leaf.lock(slot);
        let word = guard.word();
        guard.publish(Word::EMPTY);
        if let Some(location) = word.object() {
            pool.free(location);
            bytes += Pool::charged_bytes(word.stored_bytes());
        }
    }
    bytes
}
