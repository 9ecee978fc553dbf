//! Tests of explorations: the states against a brute-force reference, equal states, reductions, bounds.

mod changes;
mod failures;
mod harness;
mod models;
mod planted;
mod reductions;
mod schedules;
#[path = "../../examples/tiny_store/store.rs"]
mod store;
