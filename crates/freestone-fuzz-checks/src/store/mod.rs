//! What a store of objects can answer, whoever holds it.
//!
//! | byte | what |
//! |---|---|
//! | 0 | the door through which the input comes |
//! | 1 | choices of that door |
//! | then | what its module says |
//!
//! Most objects are known by the hash of what they hold, so bytes as they are end at the hash. With a choice
//! the hashes and seals are made right, as somebody with the key can do it.
//! * What is refused and what is taken is what a plain reading of the format says, and what was taken is what that finds.
//!   Hashes and keys are worked out anew here.
//! * What was read is written as the same bytes, or as bytes that are read as the same.
//! * An image over objects that were changed shows its own bytes or an error, and an error only where something that
//!   it needs was changed; the cache keeps nothing else.
//! * No call asks for more bytes than a sound object can have, or for none.

mod images;
mod keys;
mod manifests;
mod maps;
mod packed;
mod reference;
mod words;

use reference::Reference;

/// Stores to check inputs with, one after the other.
pub struct Stores(Reference);

impl Stores {
    /// With an image that was pushed.
    ///
    /// # Panics
    /// It cannot be pushed.
    #[allow(clippy::new_without_default, reason = "it pushes an image")]
    pub fn new() -> Self {
        Self(Reference::new())
    }

    /// Checks one input; true: something was taken.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn check(&self, input: &[u8]) -> bool {
        let Some((&[door, choices], rest)) = input.split_first_chunk() else { return false };
        match door % 8 {
            0 => words::description(choices, rest),
            1 => words::tag(&self.0, choices, rest),
            2 => manifests::check(choices, rest),
            3 => maps::check(choices, rest),
            4 => packed::chunk(choices, rest),
            5 => packed::description(choices, rest),
            6 => packed::trace(choices, rest),
            _ => images::check(&self.0, choices, rest),
        }
    }
}
