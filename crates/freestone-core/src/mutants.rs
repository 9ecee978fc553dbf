//! Faults injected on purpose, to check that the tests find them. Compiled in with `--cfg freestone_mutants`;
//! the environment variable `FREESTONE_MUTANT` selects one. Otherwise [`on`] is false at compile time.

/// A fault that can be injected. Each name states the resulting bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mutant {
    /// A snapshot's write calls the COW device while its thread is pinned.
    PinnedCall,
    /// A write that needs memory of a removed device fails with no space instead of waiting for it.
    FalseNoSpace,
    /// More than a few concurrent reads of a backing device fail.
    TooManyReads,
    /// A failed write of the zone state is treated as not executed, although it may be on disk.
    ZonesBelieveFailure,
    /// A snapshot's delta omits the part beyond the end of the base.
    DeltaEndsWithBase,
    /// A failed merge step is treated as not executed.
    MergeBelievesFailure,
    /// A merge is not recorded on disk before it begins.
    MergeUnmarked,
    /// All verbs wait for one another.
    OneVerbAtATime,
    /// A page written back replaces the one in memory although that was changed meanwhile.
    SpillsChangedPages,
    /// The last page of each leaf of an origin is not preserved for its snapshot.
    OriginForgetsSnapshot,
    /// Unlocking a slot does not wake its waiters.
    LostWakeup,
    /// Exceptions are written before the chunks that they refer to.
    ExceptionsBeforeCopies,
    /// One slot of each leaf of a removed device is not freed.
    LeakedSlot,
    /// An origin's flush never completes.
    FlushGoesNowhere,
    /// A completed vhost-user request stays recorded as in flight.
    AnsweredInFlight,
    /// The kept record of a device omits its exports.
    ExportsForgotten,
    /// A device that lost its content with a server crash is not withheld.
    LostIsShown,
    /// Objects from an image store are not verified against their names.
    StoreIsBelieved,
    /// Pages of a packed image delta are located one position further than the map says.
    PackedPagesShifted,
    /// A prune ignores the first tag.
    PruneForgetsTag,
    /// A complete file of kept content is treated as absent if its name may not be durable.
    KeptFileUnseen,
    /// A complete increment is treated as absent if its name may not be durable.
    IncrementUnseen,
    /// After the state log was replaced and the directory sync failed, the old log file stays in use.
    RewriteUnseen,
    /// After one failed write the state is never written again.
    StateGivesUp,
    /// A server starts its shutdown thread only at shutdown.
    EndStartsThread,
    /// The state records devices as resumed before the server listens.
    GoesOnEarly,
    /// A ring's thread sleeps although the kernel has refused submission entries.
    RingForgetsEntries,
    /// The exit status does not report that content could not be saved.
    EndHidesLoss,
}

/// All faults.
#[cfg(freestone_mutants)]
pub const ALL: [Mutant; 28] = [
    Mutant::PinnedCall,
    Mutant::FalseNoSpace,
    Mutant::TooManyReads,
    Mutant::ZonesBelieveFailure,
    Mutant::DeltaEndsWithBase,
    Mutant::MergeBelievesFailure,
    Mutant::MergeUnmarked,
    Mutant::OneVerbAtATime,
    Mutant::SpillsChangedPages,
    Mutant::OriginForgetsSnapshot,
    Mutant::LostWakeup,
    Mutant::ExceptionsBeforeCopies,
    Mutant::LeakedSlot,
    Mutant::FlushGoesNowhere,
    Mutant::AnsweredInFlight,
    Mutant::ExportsForgotten,
    Mutant::LostIsShown,
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

/// Returns true if this fault is active.
#[cfg(not(freestone_mutants))]
#[inline]
pub const fn on(_: Mutant) -> bool {
    false
}

/// Returns true if this fault is active.
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
