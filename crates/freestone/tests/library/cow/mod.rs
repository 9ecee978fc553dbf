//! Snapshots of origins (`freestone::cow`): content, exception stores, merges, and crashes.

mod conformance;
mod failed_writes;
mod holes;
mod invalid;
mod map;
mod map_random;
mod merge;
mod merge_durable;
mod merge_finished;
mod merge_marks;
mod older;
mod power;
mod repeated_power_loss;
mod store;
mod support;
