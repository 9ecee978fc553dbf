//! Fault rules: effects, repeatability, zones, and the contract without matching rules.

mod conformance;
mod effects;
mod repeat;
mod running;
mod support;
mod waiting;
mod zones;
