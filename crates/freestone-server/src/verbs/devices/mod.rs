//! Verbs that create, change, publish and remove devices.

pub mod apply;
pub mod create;
pub mod dump;
pub mod fork;
pub mod get;
pub mod merge;
pub mod publish;
pub mod remove;
pub mod reset;
pub mod rewind;
pub mod set;
pub mod snapshot;
pub mod unpublish;

use serde::{Deserialize, Serialize};

/// Parameters of a verb on one device in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    name: String,
    #[serde(default)]
    force: bool,
}
