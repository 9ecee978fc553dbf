//! Test drives (null devices, fault rules, power cuts, zones) of the built program: verbs, and
//! clients of their exports.

mod explorations;
mod faults;
mod guards;
mod null;
mod power;
mod recordings;
mod refusals;
mod stores;
mod zones;
