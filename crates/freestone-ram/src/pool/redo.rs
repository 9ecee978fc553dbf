//! Copies of objects while they are overwritten in place, for a process that adopts the pool after this one
//! was killed.
//!
//! Before an object is overwritten, its new bytes, the new word and the slot are recorded. So a kill during
//! the copy loses neither the old nor the new page: the adopting process copies again.
//!
//! # Protocol
//! An entry is written, then marked as valid. The object is copied, the word is stored while the slot stays
//! locked, and only then the mark is cleared and the slot unlocked. So a valid entry always belongs to a
//! locked slot, and no other thread has changed the slot since.
//!
//! Lock order: a slot, then an entry.
//!
//! The header of the file has room for a note of the family's user. Other units have the pieces of dictionaries,
//! without which objects cannot be decompressed.
#![expect(unsafe_code)]
// UNSAFETY: copies bytes to and from shared memory.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::compiler_fence;

use super::{BackRef, Pool};
use freestone_core::PAGE_BYTES;
use freestone_core::arena::Arena;
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::percpu::PerCpu;
use freestone_core::slot::{SlotGuard, Word};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};
use freestone_core::word_lock::Word as _;

/// Bytes of an entry in the file: its words, and room for a page.
const ENTRY_BYTES: u64 = 8192;
const WORDS: usize = 3;
/// Place of the object's bytes in an entry, of the note in the header, and of a piece of a dictionary.
const OBJECT: u64 = ENTRY_BYTES - PAGE_BYTES as u64;

/// First words of the file: what it is, and the version of the layout of all files of a family.
const MAGIC: u64 = u64::from_le_bytes(*b"freeston");
/// Version of the layout of a family's files.
pub const LAYOUT: u64 = 1;

/// First word of a unit with a piece of a dictionary: this mark, the priority of its algorithm from bit
/// [`PRIORITY_SHIFT`] on, and the length of the piece. The second word is the number of the piece, the third the
/// length of the dictionary.
const DICTIONARY: u64 = 1 << 62;
const PRIORITY_SHIFT: u32 = 32;

/// Entries of objects that are being overwritten, one for each CPU.
pub struct Redo {
    arena: Arena,
    entries: PerCpu<Mutex<Entry>>,
}

/// File of a process that has ended. Its entries are still valid.
pub struct RedoFile {
    arena: Arena,
    note: Vec<u8>,
    dictionaries: BTreeMap<u64, StoredDictionary>,
}

#[derive(Default)]
struct StoredDictionary {
    /// Length of the whole dictionary.
    len: u64,
    bytes: Vec<u8>,
    units: Vec<u32>,
}

/// Number of an entry's unit in the file.
struct Entry(u32);

/// An object that was being overwritten when its process was killed.
pub struct Interrupted {
    pub owner: BackRef,
    pub word: Word,
    pub object: Vec<u8>,
}

/// Reasons why the file cannot be used.
#[derive(Debug)]
pub enum RedoError {
    File(rustix::io::Errno),
    NoMemory,
    /// The file is not one of a family.
    Foreign,
    /// The layout has this version.
    Layout(u64),
}

impl Redo {
    /// Creates a file without valid entries.
    pub fn new() -> Result<Self, RedoError> {
        let arena = Arena::new("freestone-family", ENTRY_BYTES).map_err(RedoError::File)?;
        let redo = Self::with(arena)?;
        let [magic, layout, _] = words(&redo.arena, 0);
        // Relaxed: the file is not shared yet.
        layout.store(LAYOUT, Ordering::Relaxed);
        // Release: the version is stored before.
        magic.store(MAGIC, Ordering::Release);
        Ok(redo)
    }

    /// Reads the file of a process that has ended. Returns the objects that it was overwriting.
    pub fn read(file: OwnedFd) -> Result<(RedoFile, Vec<Interrupted>), RedoError> {
        let arena = Arena::adopt(file, ENTRY_BYTES).map_err(RedoError::File)?;
        let units = arena.units_ever_allocated();
        if units == 0 {
            return Err(RedoError::Foreign);
        }
        // Relaxed: the process that stored the words has ended.
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [magic, layout, note_len] = words(&arena, 0).each_ref().map(load);
        if magic != MAGIC {
            return Err(RedoError::Foreign);
        }
        if layout != LAYOUT {
            return Err(RedoError::Layout(layout));
        }
        let (mut interrupted, mut pieces) = (Vec::new(), Vec::new());
        for unit in 1..units {
            let [len, second, third] = words(&arena, unit).each_ref().map(load);
            if (1..=PAGE_BYTES as u64).contains(&len) {
                let object = bytes(&arena, unit, len);
                let (owner, word) = (BackRef::from_bits(second), Word::from_bits(third));
                interrupted.push(Interrupted { owner, word, object });
            } else if len & DICTIONARY != 0 {
                pieces.push((len, second, third, unit));
            }
        }
        let note = bytes(&arena, 0, note_len);
        let dictionaries = read_dictionaries(&arena, pieces);
        Ok((RedoFile { arena, note, dictionaries }, interrupted))
    }

    /// Allocates the entries, behind the header.
    fn with(arena: Arena) -> Result<Self, RedoError> {
        let alloc = || arena.alloc_populated(ENTRY_BYTES).map_err(|_| RedoError::NoMemory);
        if arena.units_ever_allocated() == 0 {
            alloc()?;
        }
        let entries = PerCpu::try_new(|| Ok(Mutex::new(Entry(alloc()?))))?;
        Ok(Self { arena, entries })
    }

    /// Returns the file, for a process that adopts it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.arena.file()
    }

    /// Stores a note in the header, for the process that adopts the file. Returns false if the note is longer
    /// than a page. Must be called before another process can have the file.
    pub fn set_note(&self, note: &[u8]) -> bool {
        if note.len() > PAGE_BYTES {
            return false;
        }
        let room = object(&self.arena, 0).as_ptr().cast();
        // SAFETY: the room holds a page, and no other thread uses it.
        unsafe { std::ptr::copy_nonoverlapping(note.as_ptr(), room, note.len()) };
        let [_, _, len] = words(&self.arena, 0);
        // Release: the note is complete before its length.
        len.store(note.len() as u64, Ordering::Release);
        true
    }

    /// Stores the dictionary of the algorithm with this priority, for the process that adopts the file; an empty one
    /// if the algorithm has none. Called once for a priority, before an object needs the dictionary.
    ///
    /// # Errors
    /// Fails if memory is short. Nothing is stored then.
    pub fn store_dictionary(&self, priority: usize, dictionary: &[u8]) -> Result<(), RedoError> {
        let count = dictionary.len().div_ceil(PAGE_BYTES).max(1);
        let mut units = Vec::new();
        while units.len() < count {
            let Ok(unit) = self.arena.alloc_populated(ENTRY_BYTES) else {
                // SAFETY: the units were just allocated, and have no content.
                units.into_iter().for_each(|unit| unsafe { self.arena.free(unit) });
                return Err(RedoError::NoMemory);
            };
            units.push(unit);
        }
        let pieces = dictionary.chunks(PAGE_BYTES).chain(dictionary.is_empty().then_some(&[][..]));
        for ((number, piece), unit) in (0..).zip(pieces).zip(units) {
            let room = object(&self.arena, unit).as_ptr().cast();
            // SAFETY: the room holds a page, and no other thread uses the unit.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), room, piece.len()) };
            let [first, second, third] = words(&self.arena, unit);
            // Relaxed: the next store publishes both.
            second.store(number, Ordering::Relaxed);
            // Relaxed: as above.
            third.store(dictionary.len() as u64, Ordering::Relaxed);
            // Release: the piece is complete before it is valid.
            first.store(
                DICTIONARY | (priority as u64) << PRIORITY_SHIFT | piece.len() as u64,
                Ordering::Release,
            );
        }
        Ok(())
    }

    /// Overwrites the object of a locked slot in place, as [`Pool::overwrite`], and stores the slot's new
    /// word, which refers to the same object.
    pub fn overwrite(&self, pool: &Pool, guard: &mut SlotGuard<'_>, owner: BackRef, new: Word, data: &[u8]) {
        let entry = self.entries.lock();
        let [len, to, word] = words(&self.arena, entry.0);
        let room = object(&self.arena, entry.0).as_ptr().cast();
        // SAFETY: the entry is locked, and its room holds a page.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), room, data.len()) };
        // Relaxed: the next store publishes both.
        to.store(owner.bits(), Ordering::Relaxed);
        // Relaxed: as above.
        word.store(new.bits(), Ordering::Relaxed);
        // Release: the entry is complete before it is valid.
        len.store(data.len() as u64, Ordering::Release);
        // A kill ends all threads between two instructions: the order of the program is enough.
        compiler_fence(Ordering::SeqCst);
        kill_points::pass(KillPoint::OverwriteRecorded);
        kill_points::pass_with(KillPoint::HalfOverwritten, || pool.overwrite_half(guard, data));
        pool.overwrite(guard, data);
        guard.store(new);
        kill_points::pass(KillPoint::Overwritten);
        compiler_fence(Ordering::SeqCst);
        // Release: the object and its word are stored before.
        len.store(0, Ordering::Release);
    }
}

impl RedoFile {
    /// Returns the [note](Redo::set_note), empty if there is none.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// Returns the [dictionary](Redo::store_dictionary) of the algorithm with a priority; `None` if none is stored.
    pub fn dictionary(&self, priority: usize) -> Option<&[u8]> {
        self.dictionaries.get(&(priority as u64)).map(|dictionary| &dictionary.bytes[..])
    }

    /// Removes all entries, and continues with the file.
    pub fn adopt(self) -> Result<Redo, RedoError> {
        let of_dictionaries = self.dictionaries.values().flat_map(|dictionary| &dictionary.units);
        let mut kept: Vec<u32> = of_dictionaries.copied().chain([0]).collect();
        kept.sort_unstable();
        // SAFETY: entries are allocated anew; the first unit is the header.
        unsafe { self.arena.keep_units(&kept) }.map_err(|_| RedoError::NoMemory)?;
        Redo::with(self.arena)
    }
}

/// Returns the complete dictionaries: the process may have been killed while it stored another one.
fn read_dictionaries(
    arena: &Arena,
    mut pieces: Vec<(u64, u64, u64, u32)>,
) -> BTreeMap<u64, StoredDictionary> {
    let mut found: BTreeMap<u64, StoredDictionary> = BTreeMap::new();
    pieces.sort_unstable_by_key(|(_, number, ..)| *number);
    for (first, number, len, unit) in pieces {
        let priority = (first & !DICTIONARY) >> PRIORITY_SHIFT;
        let dictionary = found.entry(priority).or_default();
        if number == dictionary.units.len() as u64 {
            dictionary.bytes.extend(bytes(arena, unit, first & u64::from(u32::MAX)));
            dictionary.units.push(unit);
            dictionary.len = len;
        }
    }
    found.retain(|_, dictionary| dictionary.bytes.len() as u64 == dictionary.len);
    found
}

fn words(arena: &Arena, unit: u32) -> &[AtomicU64; WORDS] {
    let address = arena.at(u64::from(unit) * ENTRY_BYTES).cast();
    // SAFETY: mapped and aligned, accessed only as atomics; it lives as long as the arena.
    unsafe { address.as_ref() }
}

/// Returns the first `len` bytes of an entry's object, at most a page.
fn bytes(arena: &Arena, unit: u32, len: u64) -> Vec<u8> {
    let len = len.min(PAGE_BYTES as u64) as usize;
    // SAFETY: mapped; the process that wrote the bytes has ended.
    let object = unsafe { object(arena, unit).as_ref() };
    object[..len].to_vec()
}

fn object(arena: &Arena, unit: u32) -> NonNull<[u8; PAGE_BYTES]> {
    arena.at(u64::from(unit) * ENTRY_BYTES + OBJECT).cast()
}
