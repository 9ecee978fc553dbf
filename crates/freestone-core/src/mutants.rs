//! Faults that are put back on purpose, to see whether the tests find them. Only with `--cfg
//! freestone_mutants`, and then the one that `FREESTONE_MUTANT` names; else [`on`] is false at
//! compile time.

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mutant {
    /// A snapshot's write calls the COW device with the thread pinned.
    PinnedCall,
    /// A write that meets memory of a removed device does not wait for it: no space.
    FalseNoSpace,
    /// More than a few reads of a backing device at once fail.
    TooManyReads,
    /// A write of the zones' state that failed is believed not to have happened.
    ZonesBelieveFailure,
    /// A delta of a snapshot leaves out what lies behind the end of the base.
    DeltaEndsWithBase,
    /// A merge step that failed is believed not to have happened.
    MergeBelievesFailure,
    /// A merge is not marked on disk before it begins.
    MergeUnmarked,
    /// All verbs wait for one another.
    OneVerbAtATime,
    /// What was written to the backing device is taken for the page, though that changed meanwhile.
    SpillsChangedPages,
    /// The last page of each leaf of an origin does not move to a snapshot.
    OriginForgetsSnapshot,
    /// Who gives a slot back does not wake who waits for it.
    LostWakeup,
    /// Exceptions are on disk before what they point to.
    ExceptionsBeforeCopies,
    /// One slot of each leaf of a removed device is not freed.
    LeakedSlot,
    /// An origin's flush is answered by nobody.
    FlushGoesNowhere,
    /// What a machine was answered stays noted as in flight.
    AnsweredInFlight,
    /// What is kept of a device leaves out where it is published.
    ExportsForgotten,
    /// A device that has lost its content with a server is not withheld.
    LostIsShown,
    /// What comes from a store of images is not held against its name.
    StoreIsBelieved,
    /// Pages of a packed delta of an image lie one further than its map says.
    PackedPagesShifted,
    /// A prune does not look at the first tag.
    PruneForgetsTag,
    /// A whole file of kept content whose name may not be durable is taken for absent.
    KeptFileUnseen,
    /// So is an increment.
    IncrementUnseen,
    /// A state whose log was replaced, and whose directory could not be synced, goes on with the old file.
    RewriteUnseen,
    /// A state that could not be written once is not written again.
    StateGivesUp,
    /// A server starts the thread of its end only then.
    EndStartsThread,
    /// A state records that its devices go on before the server listens.
    GoesOnEarly,
    /// A ring's thread waits although the kernel has refused entries.
    RingForgetsEntries,
    /// The exit status does not tell that content could not be saved.
    EndHidesLoss,
}

/// All of them.
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

/// Whether this fault is there.
#[cfg(not(freestone_mutants))]
#[inline]
pub const fn on(_: Mutant) -> bool {
    false
}

/// Whether this fault is there.
///
/// # Panics
/// `FREESTONE_MUTANT` is none.
#[cfg(freestone_mutants)]
pub fn on(mutant: Mutant) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<Mutant>> = std::sync::OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let name = std::env::var("FREESTONE_MUTANT").ok().filter(|name| !name.is_empty())?;
        let found = ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
        Some(found.unwrap_or_else(|| panic!("FREESTONE_MUTANT={name}: one of {ALL:?}")))
    });
    *chosen == Some(mutant)
}
