//! What is not the same for all that can be asked for.

use std::path::Path;

use freestone::qcow2::Format;

use super::build::Built;
use super::registry::Registry;
use super::{ForkSpec, Spec};
use crate::family::FamilySpec;
use crate::layers::Below;
use crate::refusal::Refusal;

/// A kind as it was asked for. What it does not say is the usual.
pub trait Asked {
    /// Sets it up, without its layers. What it stands on is looked for in the registry. The error
    /// does not name the device.
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<Built, Refusal>;

    /// What it shares with others: with its own snapshots and their forks, or its forks with one
    /// another.
    fn family(&self) -> Option<&FamilySpec> {
        None
    }

    /// Its size in bytes, where that was said.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Only reads are served.
    fn is_read_only(&self) -> bool {
        false
    }

    /// What forks are made of, for a fork or template.
    fn fork(&self) -> Option<&ForkSpec> {
        None
    }

    /// The name of what it shows where it holds nothing itself.
    fn below(&self) -> Option<&str> {
        None
    }

    /// The name of the device that takes its copies.
    fn copies_to(&self) -> Option<&str> {
        None
    }

    /// Devices that must not be rewound, merged or published while it is set up.
    fn changes(&self) -> Vec<&str> {
        Vec::new()
    }

    /// The image that it is, as the base of a delta names it.
    fn image(&self) -> Option<(&Path, Format)> {
        None
    }

    /// See [`Spec::is_lost`].
    fn is_lost(&self) -> bool {
        false
    }

    /// What its layers have to know.
    fn below_layers(&self) -> Below<'_> {
        Below::default()
    }
}
