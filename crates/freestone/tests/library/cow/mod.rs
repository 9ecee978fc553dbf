//! Snapshots of origins: what they show, their exception stores, merges, and what is there after a
//! crash.

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
mod power_again;
mod store;
mod support;
