//! Verbs on simulated drives: zones, power cuts, marks in write logs, and held requests of fault rules.

pub mod mark;
pub mod power_cut;
pub mod release;
mod stack_cut;
pub mod zones;
