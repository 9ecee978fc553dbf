//! Conversions between the driver's structures and Freestone's: device parameters, request descriptors, and
//! zones.
//!
//! The functions have no state. The device thread and the queues call them.

pub mod params;
pub mod task;
pub mod zones;
