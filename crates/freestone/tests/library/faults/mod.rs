//! Faults: each effect, what repeats, zones, and the contract where no rule fires.

mod conformance;
mod effects;
mod repeat;
mod running;
mod support;
mod waiting;
mod zones;
