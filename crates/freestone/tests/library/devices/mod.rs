//! The device contract, asked of RAM disks, files and null devices, and what is particular to files
//! and null devices.

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
