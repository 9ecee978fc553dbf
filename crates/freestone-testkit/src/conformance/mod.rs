//! Conformance suite: checks a device against the contract of [`freestone_core::device`].
//!
//! [`check`] is the entry point. It creates fresh devices and panics with the name, the seed and
//! the violation; [`run`] returns a `Result` instead. The other functions check one part of the
//! contract on a given device: [`geometry`], [`errors`], [`content`], [`extents`], [`concurrent`],
//! [`abandoned`], [`grown`]. [`check_zoned`] checks a device with zones.
//!
//! The suite drives a device like an export (try, then submit the rest), through `submit` only, and
//! mixed (a random prefix tried, the rest submitted). The initial content may be anything; the
//! suite reads it.

mod basics;
mod concurrent;
mod content;
mod driver;
mod extents;
mod zoned;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::Device;

pub use basics::{abandoned, errors, geometry};
pub use concurrent::concurrent;
pub use content::{content, grown};
pub use extents::extents;
pub use zoned::{check_zoned, run_zoned};

/// Properties of a device and limits of the suite.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Written data can be read back. False for a device that discards writes; its content must
    /// then never change.
    pub stores: bool,
    /// Byte that is read beyond the write pointer of a zone.
    pub unwritten: u8,
    /// Seed of all random choices.
    pub seed: u64,
    /// Random operations per window and way (try, submit, mixed). A device larger than a window has
    /// two windows.
    pub rounds: u32,
    /// Bytes at the start and at the end of the device that are compared with a model.
    pub window: u64,
    /// Longest request in bytes, at least 64 KiB.
    pub max_io: u64,
    /// Threads of the concurrent part.
    pub threads: u32,
    /// Requests per thread of the concurrent part.
    pub thread_rounds: u32,
    /// Bytes that overlapping requests read and write atomically. At most the logical block; less
    /// for a device over another one with smaller blocks.
    pub whole: u64,
    /// Time after which a completion counts as lost.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            stores: true,
            unwritten: 0,
            seed: 0x5eed,
            rounds: 300,
            window: 4 << 20,
            max_io: 1 << 20,
            threads: 4,
            thread_rounds: 300,
            whole: u64::MAX,
            patience: Duration::from_secs(20),
        }
    }
}

/// A violation of the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Part of the suite that found it.
    pub check: &'static str,
    /// Observation and requirement.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.what)
    }
}

impl std::error::Error for Violation {}

/// Result of a check.
pub type Checked<T = ()> = Result<T, Violation>;

/// Returns a [`Violation`] from the surrounding check unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $check:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::conformance::Violation { check: $check, what: format!($($what)+) });
        }
    };
}
use ensure;

/// Creates a fresh device for the suite's exclusive use. Its content may be overwritten.
pub type Make<'a> = &'a dyn Fn() -> Arc<dyn Device>;

/// Runs the whole suite over devices from `make`.
///
/// # Panics
/// If the contract is violated; the message has `name`, the seed and the violation.
pub fn check(name: &str, make: Make<'_>, options: Options) {
    if let Err(violation) = run(make, &options) {
        panic!("{name} violates the device contract (seed {:#x}): {violation}", options.seed);
    }
}

/// Runs the whole suite over devices from `make` until the first violation.
///
/// For a read-only device, checks that writes fail and that the content does not change.
pub fn run(make: Make<'_>, options: &Options) -> Checked {
    let device = make();
    geometry(&*device)?;
    errors(&*device, options)?;
    content(&*device, options)?;
    extents(&*device, options)?;
    drop(device);
    if !make().geometry().read_only {
        concurrent(&*make(), options)?;
    }
    abandoned(make(), options)
}
