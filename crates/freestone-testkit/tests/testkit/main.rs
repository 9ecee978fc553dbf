//! Tests of the test devices, and checks that the conformance suite detects violations.

mod broken;
mod broken_zoned;
mod faulty;
mod models;
