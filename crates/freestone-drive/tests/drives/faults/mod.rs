//! Fault rules of a device: effects, repeatability, zones, and the device contract without matching
//! rules.

mod conformance;
mod effects;
mod repeat;
mod running;
mod support;
mod waiting;
mod zones;
