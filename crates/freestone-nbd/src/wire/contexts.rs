//! The NBD metadata contexts that the server offers, and their selection by clients.

use bitflags::bitflags;

use crate::proto::{BASE_ALLOCATION, BASE_ALLOCATION_ID, FREESTONE_CHANGED, FREESTONE_CHANGED_ID};

bitflags! {
    /// A set of metadata contexts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Contexts: u8 {
        /// [`BASE_ALLOCATION`]: extents that are holes or zeroes.
        const ALLOCATION = 1;
        /// [`FREESTONE_CHANGED`]: content that a fork or snapshot holds itself.
        const CHANGED = 2;
    }
}

/// Each context with its name and its identifier in NBD messages. Lists and block status replies use this
/// order.
pub const ALL: [(Contexts, &str, u32); 2] = [
    (Contexts::ALLOCATION, BASE_ALLOCATION, BASE_ALLOCATION_ID),
    (Contexts::CHANGED, FREESTONE_CHANGED, FREESTONE_CHANGED_ID),
];

impl Contexts {
    /// Returns the contexts offered for a device. `changes` is true if the device reports changes over its
    /// base.
    pub fn offered(changes: bool) -> Self {
        if changes { Self::all() } else { Self::ALLOCATION }
    }

    /// Returns the contexts that match a query. If `list` is true, a namespace with its colon, such as
    /// `base:`, matches all contexts of the namespace.
    pub fn matching(query: &str, list: bool) -> Self {
        let hit = |name: &str| {
            name == query || (list && query.ends_with(':') && name.split_inclusive(':').next() == Some(query))
        };
        ALL.iter().filter(|(_, name, _)| hit(name)).map(|(context, ..)| *context).collect()
    }

    /// Returns the contexts with the identifiers `ids`, or None if an identifier is not in this set or occurs
    /// twice.
    pub fn by_ids(self, ids: impl Iterator<Item = u32>) -> Option<Self> {
        let mut chosen = Self::empty();
        for wanted in ids {
            let (context, ..) = ALL.iter().find(|(.., id)| *id == wanted)?;
            if !self.contains(*context) || chosen.contains(*context) {
                return None;
            }
            chosen |= *context;
        }
        Some(chosen)
    }

    /// Returns the contexts with these names.
    ///
    /// # Errors
    /// Returns the first unknown name.
    pub fn by_names(names: &[String]) -> Result<Self, &str> {
        let known = |name| ALL.iter().find(|(_, known, _)| *known == name).map(|(context, ..)| *context);
        names.iter().map(|name| known(name).ok_or(&name[..])).collect()
    }

    /// Returns the name and identifier of each context in the set.
    pub fn names_and_ids(self) -> impl Iterator<Item = (&'static str, u32)> {
        ALL.iter().filter(move |(context, ..)| self.contains(*context)).map(|(_, name, id)| (*name, *id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_ids_unselected_or_duplicate_returns_none() {
        let both = Contexts::all();
        assert_eq!(both.by_ids([2, 1].into_iter()), Some(both));
        assert_eq!(both.by_ids([2].into_iter()), Some(Contexts::CHANGED));
        assert_eq!(Contexts::ALLOCATION.by_ids([2].into_iter()), None);
        for wrong in [[1, 1], [0, 1], [3, 1]] {
            assert_eq!(both.by_ids(wrong.into_iter()), None, "{wrong:?}");
        }
    }

    #[test]
    fn matching_namespace_only_when_listing() {
        assert_eq!(Contexts::matching("base:allocation", false), Contexts::ALLOCATION);
        assert_eq!(Contexts::matching("freestone:changed", true), Contexts::CHANGED);
        assert_eq!(Contexts::matching("base:", true), Contexts::ALLOCATION);
        assert_eq!(Contexts::matching("freestone:", true), Contexts::CHANGED);
        for (query, list) in
            [("base:", false), ("freestone:", false), ("", true), (":", true), ("base", true)]
        {
            assert_eq!(Contexts::matching(query, list), Contexts::empty(), "{query}");
        }
    }
}
