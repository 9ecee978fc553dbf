//! The power layer (cuts and recordings): device contract, content after cuts, the log, and a real
//! database.

mod after;
mod conformance;
mod cuts;
mod database;
mod faulty_disks;
mod model;
mod recording;
mod units;
