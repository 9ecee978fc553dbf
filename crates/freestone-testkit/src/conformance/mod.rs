//! Checks any device against the contract of [`freestone_core::device`].
//!
//! [`check`] is the entry point: it makes fresh devices and panics with the name, the seed and what
//! was violated. [`run`] is the same as a `Result`. The finer functions check one part of the
//! contract on a device that the caller made: [`geometry`], [`errors`], [`content`], [`extents`],
//! [`concurrent`], [`abandoned`], [`grown`]. A device with zones is checked with [`check_zoned`].
//!
//! The suite drives a device as an export does (try, then submit the rest), through `submit` alone,
//! and mixed (a random prefix tried, the rest submitted). It assumes nothing of the first content,
//! but reads it.

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

/// What the suite should know of a device, and how long it may take.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Written data can be read back. False for a device that forgets writes: its content must then
    /// never change.
    pub stores: bool,
    /// The byte that is read behind the write pointer of a zone.
    pub unwritten: u8,
    /// Determines every random choice.
    pub seed: u64,
    /// Random operations per window and way; a way is one of try, submit, mixed. There are two
    /// windows where the device is larger than one.
    pub rounds: u32,
    /// Bytes at the start and at the end of the device that are compared with the model.
    pub window: u64,
    /// Longest request in bytes, at least 64 KiB.
    pub max_io: u64,
    /// Threads of the concurrent part.
    pub threads: u32,
    /// Requests per thread of the concurrent part.
    pub thread_rounds: u32,
    /// Bytes that requests which overlap write and read as a whole: no more than the logical block,
    /// and less for a device over one with smaller blocks.
    pub whole: u64,
    /// An answer that takes longer than this counts as lost.
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

/// A rule of the contract that a device broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which part of the suite found it.
    pub check: &'static str,
    /// What was seen, and what the contract asks for.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.what)
    }
}

impl std::error::Error for Violation {}

/// The outcome of a check.
pub type Checked<T = ()> = Result<T, Violation>;

/// Ends the surrounding check with a [`Violation`] unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $check:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::conformance::Violation { check: $check, what: format!($($what)+) });
        }
    };
}
use ensure;

/// Makes a fresh device: nothing else uses it, and the suite may overwrite all of it.
pub type Make<'a> = &'a dyn Fn() -> Arc<dyn Device>;

/// Runs the whole suite over devices from `make`.
///
/// # Panics
/// When the contract is violated; the message has `name`, the seed and the rule.
pub fn check(name: &str, make: Make<'_>, options: Options) {
    if let Err(violation) = run(make, &options) {
        panic!("{name} violates the device contract (seed {:#x}): {violation}", options.seed);
    }
}

/// Runs the whole suite over devices from `make`; ends with the first violation.
///
/// A read-only device is checked for refusing writes and for content that does not change.
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
