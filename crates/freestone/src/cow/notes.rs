//! What an origin says of itself beside its data: that a merge into it is under way, and of which store. Where it can say that, it is
//! known to be half old, half new also by those who were not told of the store.

/// A place beside an origin's data that outlives the process.
///
/// The order is that of the store's own mark: the store is marked, then the origin, then the first chunk is copied; when all is
/// copied the origin's note goes first. So an origin with a note has a store with a mark.
pub trait Notes: Send + Sync {
    /// The number of the merge that is under way.
    fn merge(&self) -> Option<u64>;
    /// Notes a merge durably, and where its store is, for people. What fails is only logged: the store has its mark. Blocks.
    fn merge_begins(&self, id: u64, store: &str);
    /// Takes the note away durably. Blocks.
    fn merge_ended(&self);
}
