//! Runs fio with Freestone's I/O engine, on every kind of device.

mod failures;
mod harness;
mod jobs;
mod verify;
mod zones;
