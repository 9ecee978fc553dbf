//! Groups: neighbouring pages that are compressed together, which takes less memory than each page
//! alone.
//!
//! # Storage
//! * The object of a group is stored in *pieces*, each an object of the pool. The slots of a table
//!   of its own refer to the pieces. So compaction moves pieces as it moves pages, by their
//!   back-references. No layer has this table: passes over the pages of devices do not see the
//!   pieces.
//! * Group `n` has the slots from `n * GROUP_SLOTS` on. The first is the *header*, which counts the
//!   users of the group; the others refer to the pieces. A group without users has no pieces, and
//!   its number is reused.
//! * The word of a page in a group ([`Kind::Grouped`]) states the group's number and the position
//!   of the page in the group. The word can move to another table, as every word. The page's owner
//!   is charged for a share of the group's bytes.
//!
//! # Life of a group
//! [`create`](Groups::create) stores the pieces before any word refers to them. Its caller is a
//! user until [`finish`](Groups::finish), so the group lives while the words are published. A
//! thread that removes a word from the last slot calls [`leave`](Groups::leave), and the last user
//! frees the pieces. The content never changes.
//!
//! The table keeps its leaves until the family ends, and reuses them.
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
//! Lock order: the slot of a page, a reader, a header or piece (one at a time), the pool's locks.
//! `numbers` is a leaf lock.

use std::sync::Arc;

use crate::codec::{GROUP_PAGES, GroupReader, Page, Scratch};
use crate::pool::backrefs::MAX_TABLE_ID;
use crate::pool::{BackRef, Pool};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu::{self, Counters, PerCpu};
use freestone_core::slot::{Common, Kind, LEAF_SLOTS, Leaf, MAX_SLOTS, SlotGuard, Table, Word};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Table id of the pieces. Layers have smaller ids.
const TABLE_ID: u32 = MAX_TABLE_ID;
/// Number of slots for each group: a header, and the pieces. Also the number of positions in a
/// group.
const GROUP_SLOTS: u64 = 8;
/// Largest object of a group, in bytes. Pages whose group is larger stay alone.
pub(in crate::ram) const OBJECT_BYTES_MAX: usize = (GROUP_SLOTS as usize - 1) * PIECE_BYTES;
/// Largest piece, in bytes: the largest object that wastes no memory of the pool.
const PIECE_BYTES: usize = Scratch::BYTES;
const _: () = assert!(LEAF_SLOTS.is_multiple_of(GROUP_SLOTS) && GROUP_PAGES as u64 <= GROUP_SLOTS);

/// Indices of the counters.
mod counter {
    pub const GROUPS: usize = 0;
    pub const PAGES: usize = 1;
    pub const BYTES: usize = 2;
    pub const COUNT: usize = 3;
}

/// The groups of a family (devices that share a memory pool).
pub(in crate::ram) struct Groups {
    pieces: Table,
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
}

/// The group that a CPU reads.
struct Reader {
    cpu: usize,
    decoder: Option<GroupReader>,
    /// Number of the piece to read next, and the bytes of this piece that are read already.
    piece: u64,
    offset: usize,
}

/// Content of a header.
#[derive(Clone, Copy)]
struct Header {
    /// Number of words that refer to the group, plus one until the group is finished.
    users: u32,
    pieces: u64,
    /// Number of pages in the group's object.
    pages: u32,
}

/// Current sizes of a family's groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::ram) struct GroupSizes {
    pub groups: u64,
    /// Number of pages in groups.
    pub pages: u64,
    /// Bytes of pool memory of the pieces.
    pub bytes: u64,
    /// Bytes of the slot table.
    pub table_bytes: u64,
}

impl Header {
    fn of(word: Word) -> Self {
        debug_assert_eq!(word.kind(), Kind::Same);
        let bits = word.location();
        Self { users: (bits & 0xFFFF) as u32, pieces: bits >> 16 & 0xFF, pages: (bits >> 24 & 0xFF) as u32 }
    }

    fn word(self) -> Word {
        Word::same(self.users | (self.pieces as u32) << 16 | self.pages << 24)
    }
}

/// Returns the bytes of pool memory of an object of `bytes` bytes that is stored in pieces.
pub(in crate::ram) fn charged_bytes(bytes: usize) -> u64 {
    let (whole, rest) = (bytes / PIECE_BYTES, bytes % PIECE_BYTES);
    whole as u64 * Pool::charged_bytes(PIECE_BYTES) + if rest > 0 { Pool::charged_bytes(rest) } else { 0 }
}

fn group_of(word: Word) -> u64 {
    debug_assert_eq!(word.kind(), Kind::Grouped);
    word.location() / GROUP_SLOTS
}

impl Groups {
    /// # Errors
    /// [`Error::NoMemory`] if memory is short.
    pub fn new(common: &Arc<Common>) -> Result<Self> {
        let mut cpus = 0..;
        let reader = || {
            let cpu = cpus.next().unwrap_or_default();
            Ok(Mutex::new(Reader { cpu, decoder: None, piece: 0, offset: 0 }))
        };
        Ok(Self {
            pieces: Table::new(TABLE_ID, Arc::clone(common))?,
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
            for (slot, piece) in (first + 1..).zip(object.chunks(PIECE_BYTES)) {
                let stored = pool.store(piece, BackRef::new(TABLE_ID, slot), reserved);
                let location = stored.inspect_err(|_| {
                    free_pieces(pool, leaf, first, slot - first - 1);
                })?;
                leaf.lock(slot).publish(Word::compressed(location, piece.len() as u32, 0));
            }
            Ok(leaf)
        });
        let leaf = stored.inspect_err(|_| self.numbers.lock().free.push(number))?;
        let pieces = object.len().div_ceil(PIECE_BYTES) as u64;
        leaf.lock(first).publish(Header { users: pages + 1, pieces, pages }.word());
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
        self.remove_users(pool, group, missing + 1);
    }

    /// Removes a page, whose word is in no slot any more, from its group.
    pub fn leave(&self, pool: &Pool, word: Word) {
        self.counters.add(counter::PAGES, -1);
        self.remove_users(pool, group_of(word), 1);
    }

    fn remove_users(&self, pool: &Pool, group: u64, users: u32) {
        let first = group * GROUP_SLOTS;
        let Some(leaf) = self.pieces.leaf(first) else { unreachable!("group {group} has no header") };
        let guard = leaf.lock(first);
        let mut header = Header::of(guard.word());
        header.users -= users;
        guard.publish(header.word());
        let is_last = header.users == 0 || header.users == 1 && mutants::on(Mutant::GroupForgetsLastPage);
        if is_last {
            // Readers must not take the next group with this number for this one.
            for in_reader in &self.in_reader {
                let _ = in_reader.compare_exchange(group + 1, 0, Ordering::SeqCst, Ordering::SeqCst);
            }
            let bytes = free_pieces(pool, leaf, first, header.pieces);
            self.counters.add(counter::GROUPS, -1);
            self.counters.add(counter::BYTES, -(bytes as i64));
            self.numbers.lock().free.push(group);
        }
    }

    fn take_number(&self) -> Option<u64> {
        let mut numbers = self.numbers.lock();
        if let Some(number) = numbers.free.pop() {
            return Some(number);
        }
        let next = numbers.next;
        numbers.next += u64::from(next < MAX_SLOTS / GROUP_SLOTS);
        (next < numbers.next).then_some(next)
    }

    /// Returns true if a group has lost at least half of its pages. The slot of the word is locked.
    pub fn is_sparse(&self, word: Word) -> bool {
        let first = group_of(word) * GROUP_SLOTS;
        let header = self.pieces.leaf(first).map(|leaf| Header::of(leaf.peek(first)));
        header.is_some_and(|header| header.users * 2 <= header.pages)
    }

    /// Locks and returns the slot of the piece that `owner` refers to; `None` if it is not a piece.
    pub fn piece_slot(&self, owner: BackRef) -> Option<SlotGuard<'_>> {
        let leaf = if owner.table() == TABLE_ID { self.pieces.leaf(owner.slot()) } else { None };
        leaf.map(|leaf| leaf.lock(owner.slot()))
    }

    // ---- reads ------------------------------------------------------------------------------------

    /// Reads the page of a slot with this word. The slot is locked.
    ///
    /// # Errors
    /// [`Error::Media`] if the group is damaged, [`Error::NoMemory`] if the first read of a CPU
    /// finds no memory.
    pub fn read(&self, pool: &Pool, word: Word, page: &mut Page) -> Result<()> {
        let (group, position) = (group_of(word), (word.location() % GROUP_SLOTS) as usize);
        let mut reader = self.readers.lock();
        let Reader { cpu, decoder, piece, offset } = &mut *reader;
        let decoder = match decoder {
            Some(decoder) => decoder,
            None => decoder.insert(GroupReader::new()?),
        };
        let in_reader = &self.in_reader[*cpu];
        if in_reader.load(Ordering::SeqCst) != group + 1 {
            decoder.begin();
            (*piece, *offset) = (1, 0);
            in_reader.store(group + 1, Ordering::SeqCst);
        }
        let read = self.read_pieces(pool, group, position + 1, decoder, (piece, offset));
        if read.is_err() {
            in_reader.store(0, Ordering::SeqCst);
        }
        read?;
        page.copy_from_slice(decoder.page(position).ok_or(Error::Media)?);
        Ok(())
    }

    /// Decompresses a group until `pages` pages are complete.
    fn read_pieces(
        &self,
        pool: &Pool,
        group: u64,
        pages: usize,
        decoder: &mut GroupReader,
        (piece, offset): (&mut u64, &mut usize),
    ) -> Result<()> {
        let first = group * GROUP_SLOTS;
        let leaf = self.pieces.leaf(first).ok_or(Error::Media)?;
        // The header does not change apart from its users, who include the page.
        let pieces = Header::of(leaf.peek(first)).pieces;
        while decoder.pages() < pages {
            if *piece > pieces {
                // The decoder may hold back bytes that it has read.
                decoder.read(&[], pages)?;
                return if decoder.pages() < pages { Err(Error::Media) } else { Ok(()) };
            }
            let guard = leaf.lock(first + *piece);
            let rest = pool.object(&guard).get(*offset..).ok_or(Error::Media)?;
            match decoder.read(rest, pages)? {
                used if used == rest.len() => (*piece, *offset) = (*piece + 1, 0),
                0 if decoder.pages() < pages => return Err(Error::Media),
                used => *offset += used,
            }
        }
        Ok(())
    }

    // ---- statistics -------------------------------------------------------------------------------

    pub fn sizes(&self) -> GroupSizes {
        let get = |counter| self.counters.get(counter);
        // Numbers are given out in order, and leaves and directories have the same number of entries.
        let leaves = (self.numbers.lock().next * GROUP_SLOTS).div_ceil(LEAF_SLOTS);
        GroupSizes {
            groups: get(counter::GROUPS),
            pages: get(counter::PAGES),
            bytes: get(counter::BYTES),
            table_bytes: (leaves + leaves.div_ceil(LEAF_SLOTS)) * PAGE_BYTES as u64,
        }
    }

    /// Returns the memory of the readers in bytes.
    pub fn reader_bytes(&self) -> u64 {
        let bytes = |reader: &Mutex<Reader>| reader.lock().decoder.as_ref().map_or(0, GroupReader::bytes);
        self.readers.iter().map(|reader| bytes(reader) as u64).sum()
    }
}

/// Frees the first `pieces` pieces of a group without users. Returns the bytes of pool memory that
/// they used.
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
