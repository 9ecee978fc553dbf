//! The state directory of a running server: records of devices and exports, and saved content.
//!
//! `records` owns the open state and its pending changes, and `saves` the saved content and its threads. Operations on
//! a running server (`changes`, `startup`, `verbs`) use this room.

pub mod recorded;
pub mod records;
pub mod restoring;
pub mod saves;
pub mod state_args;
