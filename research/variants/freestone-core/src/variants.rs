//! Run-time selection of the locks of slots and of snapshot exceptions, and of the source of compression streams.
//!
//! This module is part of the library only in the copy of the sources that `cargo xtask bench reproduce` makes for
//! the kernel's experiments. In that copy the files next to this one replace `slot::lock`, `codec::lend` and
//! `cow::exceptions`. The files have the product's interface, contain the product's own file as one of their
//! variants, and read the selection from this module. So all columns of a table take turns in one run of one binary.
//!
//! The selection is process-wide. The selection must be changed only while no thread works on a device. With another
//! lock than the product's, only two kinds of devices are allowed. The first is a plain RAM disk that has no backing
//! device, is not a fork and has no snapshots: background threads would hold locks across the change, and some
//! operations hold several slots at once. The second is an origin with one snapshot that was created after the
//! selection.

pub mod spinlocks;

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lock of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// A spinning read-write lock for all slots.
    Table,
    /// A bit in the slot's word, set by compare-and-swap of the whole word and cleared by a store.
    Cas,
    /// A ticket spinlock per slot, in an array beside the table.
    Spin,
    /// A spinning read-write lock per slot, in an array beside the table.
    ReadWrite,
    /// A bit in the slot's word, set and cleared without changing the rest of the word.
    BitSpin,
    /// Like [`Cas`](Self::Cas), and records hold times: see [`take_hold_time`].
    Timed,
    /// No lock: the caller holds a lock, outside of this module, of the whole table or of a part.
    Outer,
    /// The product's lock.
    Ours,
}

/// Source of compression streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// A shared list of 4 streams. A thread that finds the list empty waits.
    ListOf4,
    /// A shared list of 8 streams.
    ListOf8,
    /// The product's streams: one per CPU.
    Ours,
}

/// Lock of a snapshot's exceptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exceptions {
    /// A single exclusive lock: dm-snapshot before Linux 5.2.
    One,
    /// A single exclusive lock that records hold times: see [`take_exception_hold_time`].
    Timed,
    /// A shared lock, then the chunk's bucket of complete exceptions, then that of pending ones: dm-snapshot
    /// since Linux 5.2.
    Buckets,
    /// The product's lock: the lock of the chunk's slot.
    Ours,
}

/// Use of slots that the calling thread is about to make. Readers share read-write locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Only reads pages in memory.
    Read,
    /// Any access.
    Write,
}

impl Lock {
    /// All values; the product's is the last.
    pub const ALL: [Self; 8] = [
        Self::Table,
        Self::Cas,
        Self::Spin,
        Self::ReadWrite,
        Self::BitSpin,
        Self::Timed,
        Self::Outer,
        Self::Ours,
    ];
}

impl Exceptions {
    /// All values; the product's is the last.
    pub const ALL: [Self; 4] = [Self::One, Self::Timed, Self::Buckets, Self::Ours];
}

impl Streams {
    /// All values; the product's is the last.
    pub const ALL: [Self; 3] = [Self::ListOf4, Self::ListOf8, Self::Ours];
}

/// Selected values, as indexes in `ALL` of their types.
static LOCK: AtomicU8 = AtomicU8::new(Lock::Ours as u8);
static STREAMS: AtomicU8 = AtomicU8::new(Streams::Ours as u8);
static EXCEPTIONS: AtomicU8 = AtomicU8::new(Exceptions::Ours as u8);

/// Hold time in nanoseconds and number of holds with [`Exceptions::Timed`]. Counts all threads, because an
/// exception may be completed by another thread than the one that began it.
static EXCEPTION_HOLD_TIME: (AtomicU64, AtomicU64) = (AtomicU64::new(0), AtomicU64::new(0));

thread_local! {
    static INTENT: Cell<Intent> = const { Cell::new(Intent::Write) };
    /// Hold time and number of holds of this thread with [`Lock::Timed`].
    static HOLD_TIME: Cell<(Duration, u64)> = const { Cell::new((Duration::ZERO, 0)) };
}

/// Selects the lock of slots. The module documentation says when this may be called.
pub fn set_lock(lock: Lock) {
    // Relaxed: no thread uses a device now, and starting a thread orders this store before its work.
    LOCK.store(lock as u8, Ordering::Relaxed);
}

/// Selects the source of streams. A device has lists only if a list is selected while the device is created.
pub fn set_streams(streams: Streams) {
    // Relaxed: as in `set_lock`.
    STREAMS.store(streams as u8, Ordering::Relaxed);
}

/// Selects the lock of snapshots that are created from now on. Snapshots created before must not be used any
/// more.
pub fn set_exceptions(exceptions: Exceptions) {
    set_lock(if exceptions == Exceptions::Ours { Lock::Ours } else { Lock::Outer });
    // Relaxed: as in `set_lock`.
    EXCEPTIONS.store(exceptions as u8, Ordering::Relaxed);
}

/// Sets the intent of this thread. The default is to write.
pub fn set_intent(intent: Intent) {
    INTENT.set(intent);
}

/// Returns and resets this thread's hold time and number of holds with [`Lock::Timed`]. Each hold includes one
/// reading of the clock.
pub fn take_hold_time() -> (Duration, u64) {
    HOLD_TIME.take()
}

/// Records that a slot was held since `since`.
pub fn add_hold_time(since: Instant) {
    let (time, count) = HOLD_TIME.get();
    HOLD_TIME.set((time + since.elapsed(), count + 1));
}

/// Returns and resets the hold time and number of holds with [`Exceptions::Timed`]. Each hold includes one
/// reading of the clock.
pub fn take_exception_hold_time() -> (Duration, u64) {
    let (nanos, count) = &EXCEPTION_HOLD_TIME;
    (Duration::from_nanos(nanos.swap(0, Ordering::SeqCst)), count.swap(0, Ordering::SeqCst))
}

/// Records that an exception was held since `since`.
pub fn add_exception_hold_time(since: Instant) {
    // Relaxed: read only while no thread counts.
    EXCEPTION_HOLD_TIME.0.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
    // Relaxed: read only while no thread counts.
    EXCEPTION_HOLD_TIME.1.fetch_add(1, Ordering::Relaxed);
}

/// Returns the selected lock of slots.
#[inline]
pub fn lock() -> Lock {
    // Relaxed: as in `set_lock`.
    Lock::ALL[usize::from(LOCK.load(Ordering::Relaxed))]
}

/// Returns the selected source of compression streams.
#[inline]
pub fn streams() -> Streams {
    // Relaxed: as in `set_streams`.
    Streams::ALL[usize::from(STREAMS.load(Ordering::Relaxed))]
}

/// Returns the selected lock of exceptions.
pub fn exceptions() -> Exceptions {
    // Relaxed: as in `set_lock`.
    Exceptions::ALL[usize::from(EXCEPTIONS.load(Ordering::Relaxed))]
}

/// Returns the intent of this thread.
#[inline]
pub fn intent() -> Intent {
    INTENT.get()
}
