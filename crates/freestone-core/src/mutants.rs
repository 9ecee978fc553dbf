//! Faults injected on purpose, to check that the tests find them. Compiled in with `--cfg freestone_mutants`;
//! the environment variable `FREESTONE_MUTANT` selects one fault. Otherwise [`on`] is false at compile time.

/// A fault that can be injected. Each name states the resulting bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mutant {
    /// A write to a snapshot calls the COW device while the calling thread is pinned.
    PinnedCall,
    /// A write that needs memory of a removed device fails with "no space" instead of waiting for this
    /// memory.
    FalseNoSpace,
    /// If more than a few reads of a backing device are in flight, further reads fail.
    TooManyReads,
    /// A failed write of the zone state is treated as not executed, although the new state may be on disk.
    ZonesBelieveFailure,
    /// A snapshot's delta omits the part beyond the end of the base.
    DeltaEndsWithBase,
    /// A failed merge step is treated as not executed.
    MergeBelievesFailure,
    /// A merge is not recorded on disk before its first chunk is copied.
    MergeUnmarked,
    /// Verbs (control commands) wait for one another instead of running concurrently.
    OneVerbAtATime,
    /// A page written back replaces the page in memory although the page was changed meanwhile.
    SpillsChangedPages,
    /// A page that was read back and changed is replaced by its former object on the backing device.
    StaleCopy,
    /// A group of pages is freed although one page still refers to it.
    GroupForgetsLastPage,
    /// The object of a spilled group is freed although one page still refers to it.
    SpilledGroupForgetsPage,
    /// A shared object is freed although one page still refers to it.
    SharedForgetsLastPage,
    /// Pages whose fingerprints begin alike share an object without a comparison of their content.
    DedupBelievesFingerprint,
    /// The last page of each leaf of an origin's page table is not preserved for its snapshot.
    OriginForgetsSnapshot,
    /// Unlocking a slot does not wake its waiters.
    LostWakeup,
    /// Exceptions are written before the chunks that they refer to.
    ExceptionsBeforeCopies,
    /// In each leaf of a removed device's page table, one slot is not freed.
    LeakedSlot,
    /// A flush of an origin completes without reaching the device under the origin.
    FlushGoesNowhere,
    /// A completed vhost-user request stays recorded as in flight.
    AnsweredInFlight,
    /// The saved record of a device omits the exports of the device.
    ExportsForgotten,
    /// A device that lost its content in a server crash is not withheld (content not restored after a crash).
    LostIsShown,
    /// The memory of a fork does not record which device it is, so the next server cannot adopt the fork.
    KeysForgotten,
    /// A server that adopts pages on a backing device takes their blocks for free ones.
    AdoptedBlocksFree,
    /// Stored objects from an image store are not verified against the hashes in their names.
    StoreIsBelieved,
    /// Pages of a packed image delta are located one position further than the page map says.
    PackedPagesShifted,
    /// A prune of an image store ignores the first tag.
    PruneForgetsTag,
    /// A complete file of saved content is treated as absent if its name may not be durable.
    KeptFileUnseen,
    /// A complete file of an increment is treated as absent if its name may not be durable.
    IncrementUnseen,
    /// After the state log was replaced and the directory sync failed, the old log file stays in use.
    RewriteUnseen,
    /// After one failed write the server's state is never written again.
    StateGivesUp,
    /// A server starts its shutdown thread only at shutdown, and not in advance.
    EndStartsThread,
    /// The state directory records devices as resumed before the server listens.
    GoesOnEarly,
    /// The thread of an `io_uring` sleeps although the kernel has refused submission entries.
    RingForgetsEntries,
    /// The exit status does not report that content could not be saved.
    EndHidesLoss,
}

/// All faults, from which `FREESTONE_MUTANT` selects one by name.
#[cfg(freestone_mutants)]
pub const ALL: [Mutant; 35] = [
    Mutant::PinnedCall,
    Mutant::FalseNoSpace,
    Mutant::TooManyReads,
    Mutant::ZonesBelieveFailure,
    Mutant::DeltaEndsWithBase,
    Mutant::MergeBelievesFailure,
    Mutant::MergeUnmarked,
    Mutant::OneVerbAtATime,
    Mutant::SpillsChangedPages,
    Mutant::StaleCopy,
    Mutant::GroupForgetsLastPage,
    Mutant::SpilledGroupForgetsPage,
    Mutant::SharedForgetsLastPage,
    Mutant::DedupBelievesFingerprint,
    Mutant::OriginForgetsSnapshot,
    Mutant::LostWakeup,
    Mutant::ExceptionsBeforeCopies,
    Mutant::LeakedSlot,
    Mutant::FlushGoesNowhere,
    Mutant::AnsweredInFlight,
    Mutant::ExportsForgotten,
    Mutant::LostIsShown,
    Mutant::KeysForgotten,
    Mutant::AdoptedBlocksFree,
    Mutant::StoreIsBelieved,
    Mutant::PackedPagesShifted,
    Mutant::PruneForgetsTag,
    Mutant::KeptFileUnseen,
    Mutant::IncrementUnseen,
    Mutant::RewriteUnseen,
    Mutant::StateGivesUp,
    Mutant::EndStartsThread,
    Mutant::GoesOnEarly,
    Mutant::RingForgetsEntries,
    Mutant::EndHidesLoss,
];

/// Returns true if the fault is active.
#[cfg(not(freestone_mutants))]
#[inline]
pub const fn on(_: Mutant) -> bool {
    false
}

/// Returns true if the fault is active.
///
/// # Panics
/// If `FREESTONE_MUTANT` is not the name of a fault.
#[cfg(freestone_mutants)]
pub fn on(mutant: Mutant) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<Mutant>> = std::sync::OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let name = std::env::var("FREESTONE_MUTANT").ok().filter(|name| !name.is_empty())?;
        let found = ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
        Some(found.unwrap_or_else(|| panic!("FREESTONE_MUTANT={name} is unknown; use one of {ALL:?}")))
    });
    *chosen == Some(mutant)
}
