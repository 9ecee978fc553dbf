//! Images that go to a store in memory and come back.

mod faults;
mod kit;
mod prunes;
mod pushes;
mod reads;
mod schedules;
