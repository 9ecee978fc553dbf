//! The metadata contexts, and which of them a client asks for.

use bitflags::bitflags;

use crate::proto::{BASE_ALLOCATION, BASE_ALLOCATION_ID, FREESTONE_CHANGED, FREESTONE_CHANGED_ID};

bitflags! {
    /// A set of metadata contexts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Contexts: u8 {
        /// [`BASE_ALLOCATION`]: what are holes and zeroes.
        const ALLOCATION = 1;
        /// [`FREESTONE_CHANGED`]: what the device holds itself.
        const CHANGED = 2;
    }
}

/// Each context with its name and its identifier on the wire, in the order in which they are told
/// and answered.
pub const ALL: [(Contexts, &str, u32); 2] = [
    (Contexts::ALLOCATION, BASE_ALLOCATION, BASE_ALLOCATION_ID),
    (Contexts::CHANGED, FREESTONE_CHANGED, FREESTONE_CHANGED_ID),
];

impl Contexts {
    /// What is offered for a device that holds changes over another, or that does not.
    pub fn offered(changes: bool) -> Self {
        if changes { Self::all() } else { Self::ALLOCATION }
    }

    /// What a query of a client asks for. A namespace with its colon alone asks for all of it where
    /// contexts are listed, and for nothing where they are set.
    pub fn asked(query: &str, list: bool) -> Self {
        let hit = |name: &str| {
            name == query || (list && query.ends_with(':') && name.split_inclusive(':').next() == Some(query))
        };
        ALL.iter().filter(|(_, name, _)| hit(name)).map(|(context, ..)| *context).collect()
    }

    /// The contexts of the set with these identifiers. `None`: one is not in the set, or there twice.
    pub fn chosen(self, ids: impl Iterator<Item = u32>) -> Option<Self> {
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

    /// Name and identifier of each context of the set.
    pub fn named(self) -> impl Iterator<Item = (&'static str, u32)> {
        ALL.iter().filter(move |(context, ..)| self.contains(*context)).map(|(_, name, id)| (*name, *id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers() {
        let both = Contexts::all();
        assert_eq!(both.chosen([2, 1].into_iter()), Some(both));
        assert_eq!(both.chosen([2].into_iter()), Some(Contexts::CHANGED));
        assert_eq!(Contexts::ALLOCATION.chosen([2].into_iter()), None);
        for wrong in [[1, 1], [0, 1], [3, 1]] {
            assert_eq!(both.chosen(wrong.into_iter()), None, "{wrong:?}");
        }
    }

    #[test]
    fn queries() {
        assert_eq!(Contexts::asked("base:allocation", false), Contexts::ALLOCATION);
        assert_eq!(Contexts::asked("freestone:changed", true), Contexts::CHANGED);
        assert_eq!(Contexts::asked("base:", true), Contexts::ALLOCATION);
        assert_eq!(Contexts::asked("freestone:", true), Contexts::CHANGED);
        for (query, list) in
            [("base:", false), ("freestone:", false), ("", true), (":", true), ("base", true)]
        {
            assert_eq!(Contexts::asked(query, list), Contexts::empty(), "{query}");
        }
    }
}
