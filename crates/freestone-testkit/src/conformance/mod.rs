//! Conformance suite: checks a device against the contract of [`freestone_core::device`].
//!
//! [`check`] is the entry point. [`check`] creates fresh devices and panics with the name, the seed
//! and the violation; [`run`] returns a `Result` instead. The other functions each check one part
//! of the contract on a given device: [`check_geometry`], [`check_errors`], [`check_content`],
//! [`check_extents`], [`check_concurrent`], [`check_abandoned`], [`check_grown`]. [`check_zoned`]
//! checks a device with zones.
//!
//! The suite sends requests in three modes. The first works like an export: try, then submit the
//! rest. The second uses `submit` only. The third tries a random prefix and submits the rest. The
//! initial content may be anything, since the suite reads it first.

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

pub use basics::{check_abandoned, check_errors, check_geometry};
pub use concurrent::check_concurrent;
pub use content::{check_content, check_grown};
pub use extents::check_extents;
pub use zoned::{check_zoned, run_zoned};

/// Properties of the device under test, and limits of the suite.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The device stores written data. False for a device that discards writes, whose content must
    /// then never change.
    pub stores_data: bool,
    /// Value of the bytes that reads beyond the write pointer of a zone return.
    pub unwritten_byte: u8,
    pub seed: u64,
    /// Number of random operations per window and submit mode (try, submit, mixed). A device larger
    /// than a window has two windows.
    pub rounds: u32,
    /// Size in bytes of a window: the part at the start or end of the device that is compared with
    /// a byte vector.
    pub window: u64,
    /// Longest request in bytes, at least 64 KiB.
    pub max_io: u64,
    /// Number of threads in the concurrent check.
    pub threads: u32,
    /// Number of requests per thread in the concurrent check.
    pub thread_rounds: u32,
    /// Number of bytes that overlapping requests read and write atomically. At most the logical
    /// block; less for a device over another one with smaller blocks.
    pub atomic_bytes: u64,
    /// Time after which a completion counts as lost.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            stores_data: true,
            unwritten_byte: 0,
            seed: 0x5eed,
            rounds: 300,
            window: 4 << 20,
            max_io: 1 << 20,
            threads: 4,
            thread_rounds: 300,
            atomic_bytes: u64::MAX,
            timeout: Duration::from_secs(20),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Name of the check that found the violation.
    pub check: &'static str,
    /// The observation and the requirement of the contract.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.message)
    }
}

impl std::error::Error for Violation {}

/// Result of a check: an error is the first violation.
pub type CheckResult<T = ()> = Result<T, Violation>;

/// Returns a [`Violation`] from the surrounding check unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $check:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::conformance::Violation { check: $check, message: format!($($what)+) });
        }
    };
}
use ensure;

/// Creates a fresh device for the suite's exclusive use. The suite may overwrite the content.
pub type DeviceFactory<'a> = &'a dyn Fn() -> Arc<dyn Device>;

/// Runs the whole suite on devices from `make`.
///
/// # Panics
/// Panics if the contract is violated. The message contains `name`, the seed and the violation.
pub fn check(name: &str, make: DeviceFactory<'_>, options: Options) {
    if let Err(violation) = run(make, &options) {
        panic!("{name} violates the device contract (seed {:#x}): {violation}", options.seed);
    }
}

/// Runs the whole suite on devices from `make` until the first violation, which it returns.
///
/// On a read-only device, the suite checks that writes fail and that the content does not change.
pub fn run(make: DeviceFactory<'_>, options: &Options) -> CheckResult {
    let device = make();
    check_geometry(&*device)?;
    check_errors(&*device, options)?;
    check_content(&*device, options)?;
    check_extents(&*device, options)?;
    drop(device);
    if !make().geometry().read_only {
        check_concurrent(&*make(), options)?;
    }
    check_abandoned(make(), options)
}
