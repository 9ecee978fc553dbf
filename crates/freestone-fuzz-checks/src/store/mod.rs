//! Image stores with arbitrary objects.
//!
//! | byte | content |
//! |---|---|
//! | 0 | kind of object |
//! | 1 | options of that kind |
//! | then | see the module of the kind |
//!
//! Most objects are named by the hash of their content, so arbitrary bytes fail at the hash. An option corrects
//! hashes and seals, as an attacker with the key could. Properties:
//! * Objects are accepted or refused as the reference parser does, with the same content. The checks compute hashes
//!   and keys independently.
//! * A parsed object is written as the same bytes, or as bytes that parse to the same object.
//! * An image over changed objects returns correct data or an error, and an error only if an object that it needs was
//!   changed. The cache stores only correct data.
//! * No call requests an empty range, or more bytes than a valid object can have.

mod images;
mod keys;
mod manifests;
mod maps;
mod packed;
mod reference;
mod words;

use reference::Reference;

/// A reference image for any number of consecutive checks.
pub struct Stores(Reference);

impl Stores {
    /// Pushes the reference image to a store in memory.
    ///
    /// # Panics
    /// Panics if the push fails.
    #[allow(clippy::new_without_default, reason = "it pushes an image")]
    pub fn new() -> Self {
        Self(Reference::new())
    }

    /// Checks one input. Returns true if an object was accepted.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn check(&self, input: &[u8]) -> bool {
        let Some((&[kind, options], rest)) = input.split_first_chunk() else { return false };
        match kind % 8 {
            0 => words::description(options, rest),
            1 => words::tag(&self.0, options, rest),
            2 => manifests::check(options, rest),
            3 => maps::check(options, rest),
            4 => packed::chunk(options, rest),
            5 => packed::description(options, rest),
            6 => packed::trace(options, rest),
            _ => images::check(&self.0, options, rest),
        }
    }
}
