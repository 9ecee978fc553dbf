//! Runs fio with the engine, over every kind of device.

mod failures;
mod harness;
mod jobs;
mod verify;
mod zones;
