//! Which lock a slot or a snapshot's exception has and whom a compression stream is borrowed from,
//! chosen while the program runs.
//!
//! Part of the library only in the copy of the sources that `cargo xtask bench reproduce` makes for
//! the kernel's experiments. There `slot::lock`, `codec::lend` and `cow::exceptions` are the files
//! beside this one: they have the product's interface, contain the product's own file as one of
//! their variants, and look here which one to use. So all columns of a table take turns in one run of one binary.
//!
//! What can be chosen is process-wide. It is changed only while no thread works on a device, and a
//! device that is driven with another lock than the product's is a plain RAM disk: neither backed
//! nor a fork nor with snapshots, whose background threads would hold locks across the change, and
//! where a thread holds several slots at once; or an origin with one snapshot, made after the
//! choice.

pub mod spinlocks;

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Who guards a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// One spinning read-write lock for all slots.
    Table,
    /// A bit in the slot's word, taken by compare-and-swap of the whole word and let go by a store.
    Cas,
    /// A ticket spinlock a slot, beside the table.
    Spin,
    /// A spinning read-write lock a slot, beside the table.
    ReadWrite,
    /// A bit in the slot's word, set and cleared by itself.
    BitSpin,
    /// As [`Cas`](Self::Cas), and takes the time: see [`held`].
    Timed,
    /// None: whoever comes to a slot holds a lock of the whole table or of a part of it, which is
    /// not this file's.
    Outer,
    /// The product's.
    Ours,
}

/// Where a compression stream comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// A shared list of 4; who finds it empty waits.
    ListOf4,
    /// A shared list of 8.
    ListOf8,
    /// The product's: one a CPU.
    Ours,
}

/// Who guards a snapshot's exceptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exceptions {
    /// One lock, which everybody takes exclusively: dm-snapshot before Linux 5.2.
    One,
    /// The same, and takes the time: see [`exceptions_held`].
    Timed,
    /// One lock that is shared, and under it the chunk's bucket of complete exceptions, then that
    /// of pending ones: dm-snapshot since.
    Buckets,
    /// The product's: the lock of the chunk's slot.
    Ours,
}

/// What the calling thread is going to do with slots: readers share a read-write lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Only look at pages that are in memory.
    Read,
    /// Anything.
    Write,
}

impl Lock {
    /// All, the product's last.
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
    /// All, the product's last.
    pub const ALL: [Self; 4] = [Self::One, Self::Timed, Self::Buckets, Self::Ours];
}

impl Streams {
    /// All, the product's last.
    pub const ALL: [Self; 3] = [Self::ListOf4, Self::ListOf8, Self::Ours];
}

/// Places in `ALL` of their types.
static LOCK: AtomicU8 = AtomicU8::new(Lock::Ours as u8);
static STREAMS: AtomicU8 = AtomicU8::new(Streams::Ours as u8);
static EXCEPTIONS: AtomicU8 = AtomicU8::new(Exceptions::Ours as u8);

/// For how many nanoseconds exceptions were held with [`Exceptions::Timed`], and how often. Of all
/// threads: an exception may be completed by another one than began it.
static EXCEPTIONS_HELD: (AtomicU64, AtomicU64) = (AtomicU64::new(0), AtomicU64::new(0));

thread_local! {
    static INTENT: Cell<Intent> = const { Cell::new(Intent::Write) };
    /// For how long the thread has held slots with [`Lock::Timed`], and how often.
    static HELD: Cell<(Duration, u64)> = const { Cell::new((Duration::ZERO, 0)) };
}

/// From now on slots have this lock. See the module for when it may be called.
pub fn set_lock(lock: Lock) {
    // Relaxed: no thread uses a device now, and starting one orders this before what it does.
    LOCK.store(lock as u8, Ordering::Relaxed);
}

/// From now on streams come from there. The lists are made with a device's streams where one of
/// them is chosen then.
pub fn set_streams(streams: Streams) {
    // Relaxed: as in `set_lock`.
    STREAMS.store(streams as u8, Ordering::Relaxed);
}

/// Snapshots that are made from now on have this lock, and those that were made before are not used
/// any more.
pub fn set_exceptions(exceptions: Exceptions) {
    set_lock(if exceptions == Exceptions::Ours { Lock::Ours } else { Lock::Outer });
    // Relaxed: as in `set_lock`.
    EXCEPTIONS.store(exceptions as u8, Ordering::Relaxed);
}

/// What this thread does from now on. A thread that never says so writes.
pub fn intend(intent: Intent) {
    INTENT.set(intent);
}

/// For how long this thread has held slots with [`Lock::Timed`], and how many, since it was last
/// asked. One reading of the clock is in the time of each.
pub fn held() -> (Duration, u64) {
    HELD.take()
}

/// A slot was held since then.
pub fn let_go(since: Instant) {
    let (time, count) = HELD.get();
    HELD.set((time + since.elapsed(), count + 1));
}

/// For how long exceptions were held with [`Exceptions::Timed`], and how often, since it was last
/// asked. One reading of the clock is in the time of each.
pub fn exceptions_held() -> (Duration, u64) {
    let (nanos, count) = &EXCEPTIONS_HELD;
    (Duration::from_nanos(nanos.swap(0, Ordering::SeqCst)), count.swap(0, Ordering::SeqCst))
}

/// An exception was held since then.
pub fn exception_let_go(since: Instant) {
    // Relaxed: numbers that are read when nobody counts.
    EXCEPTIONS_HELD.0.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
    // Relaxed: as above.
    EXCEPTIONS_HELD.1.fetch_add(1, Ordering::Relaxed);
}

/// The lock that slots are taken with now.
#[inline]
pub fn lock() -> Lock {
    // Relaxed: as in `set_lock`.
    Lock::ALL[usize::from(LOCK.load(Ordering::Relaxed))]
}

/// Where compression streams come from now.
#[inline]
pub fn streams() -> Streams {
    // Relaxed: as in `set_streams`.
    Streams::ALL[usize::from(STREAMS.load(Ordering::Relaxed))]
}

/// What snapshots are made with now.
pub fn exceptions() -> Exceptions {
    // Relaxed: as in `set_lock`.
    Exceptions::ALL[usize::from(EXCEPTIONS.load(Ordering::Relaxed))]
}

/// What this thread does.
#[inline]
pub fn intent() -> Intent {
    INTENT.get()
}
