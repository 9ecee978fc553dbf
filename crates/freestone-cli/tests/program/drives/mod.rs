//! Test drives as their users meet them: the built program, its verbs, and clients on its exports.

mod faults;
mod guards;
mod null;
mod power;
pub mod raw;
mod refusals;
mod stores;
mod zones;
