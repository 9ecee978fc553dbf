//! Devices as a whole, without their exports: claims of verbs, loops through NBD addresses, request rates, and the flush
//! at the end. The registry of the devices is in `freestone-spec`.
//!
//! The room uses no other room. `claims` owns the table of claimed names (lock order: `service.rs`).

pub mod claims;
pub mod loop_check;
pub mod rates;
pub mod shutdown;
