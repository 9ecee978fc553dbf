//! Requests of the transmission phase: commands, headers, refusals, and devices that block or fail.

mod budget;
mod bytes;
mod contexts;
mod extended;
mod garbage;
mod holes;
mod refused;
mod sweeps;
mod transmission;
mod waiting;
mod workers;
