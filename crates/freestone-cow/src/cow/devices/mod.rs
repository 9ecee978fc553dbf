//! The devices: origins and snapshots, and the steps of their life: preparation, merge, simulated power loss.
//!
//! Users of the crate use the types; no other room of the crate does. The devices pass each request to
//! [`requests`](super::requests) with the [`state`](super::state) that it needs. The lock order is stated there.

pub(super) mod merge;
pub(super) mod origin;
pub(super) mod pending;
pub(super) mod power;
pub(super) mod snapshot;
