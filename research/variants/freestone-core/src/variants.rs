//! Which lock a slot has and whom a compression stream is borrowed from, chosen while the program
//! runs.
//!
//! Part of the library only in the copy of the sources that `cargo xtask bench reproduce` makes for
//! the kernel's experiments. There `slot::lock` and `codec::lend` are the files beside this one:
//! they have the product's interface, contain the product's own file as one of their variants, and
//! look here which one to use. So all columns of a table take turns in one run of one binary.
//!
//! What can be chosen is process-wide. It is changed only while no thread works on a device, and a
//! device that is driven with another lock than the product's is a plain RAM disk: neither backed
//! nor a fork nor with snapshots, whose background threads would hold locks across the change, and
//! where a thread holds several slots at once.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};
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
    pub const ALL: [Self; 7] =
        [Self::Table, Self::Cas, Self::Spin, Self::ReadWrite, Self::BitSpin, Self::Timed, Self::Ours];
}

impl Streams {
    /// All, the product's last.
    pub const ALL: [Self; 3] = [Self::ListOf4, Self::ListOf8, Self::Ours];
}

/// Places in `Lock::ALL` and `Streams::ALL`.
static LOCK: AtomicU8 = AtomicU8::new(Lock::Ours as u8);
static STREAMS: AtomicU8 = AtomicU8::new(Streams::Ours as u8);

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

/// What this thread does.
#[inline]
pub fn intent() -> Intent {
    INTENT.get()
}
