//! The devices to test with are sound, and the conformance suite can fail.

mod broken;
mod broken_zoned;
mod faulty;
mod models;
