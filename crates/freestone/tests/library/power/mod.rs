//! Power loss and recordings: the contract, what a cut may leave, what the log says, and a real
//! database.

mod after;
mod conformance;
mod cuts;
mod database;
mod model;
mod recording;
mod trouble;
mod units;
