//! Conformance of RAM disks, files and null devices, and tests of files and null devices.

mod conformance_file;
mod conformance_layers;
mod conformance_null;
mod conformance_ram;
mod counting;
mod file_changes;
mod file_lengths;
mod file_setup;
mod file_stress;
mod limited;
mod null_badblocks;
mod null_memory;
mod null_pace;
mod null_threads;

use freestone_testkit::conformance::Options;
use freestone_testkit::effort;

/// Returns the options of the conformance suite for a device in memory: fewer rounds in a quick
/// run.
pub fn conformance_options() -> Options {
    let (rounds, window, max_io) = effort((60, 1 << 20, 256 << 10), (300, 4 << 20, 1 << 20));
    Options { rounds, thread_rounds: rounds, window, max_io, ..Options::default() }
}
