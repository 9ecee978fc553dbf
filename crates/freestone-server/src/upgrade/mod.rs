//! Upgrade of a running server: another program takes its place in the same process (`execve(2)`).
//!
//! The server ends its devices in order, except for the memory of recoverable ones, and passes listening sockets and
//! NBD connections on as a [`Handover`]. The successor finds it by an environment variable, restores the devices from
//! the state directory, adopts the memory, and continues the connections. If it cannot start, it executes the
//! predecessor again, which does the same.

mod descriptor;
mod handover;

use std::path::Path;
use std::sync::OnceLock;

use freestone_control::protocol::RpcError;
use freestone_core::sync::Mutex;
use serde::{Deserialize, Serialize};

pub use self::handover::{Connection, Handover, HandoverError, NamedDescriptor, Versions};

/// Function that begins an upgrade to the program at a path, after it has checked the program.
pub type BeginUpgrade = dyn Fn(&Path) -> Result<(), RpcError> + Send + Sync;

/// Upgrades of a server.
#[derive(Default)]
pub struct Upgrades {
    /// Set by a program that can be replaced.
    pub begin: OnceLock<Box<BeginUpgrade>>,
    /// Number of upgrades of this process, and the result of the last one. Locked only to read or replace it.
    last: Mutex<(u64, Option<UpgradeOutcome>)>,
}

/// Result of an upgrade.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeOutcome {
    /// Version of the program that runs now.
    pub version: String,
    /// Error of the upgrade: the former program runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Time for which requests waited, in milliseconds.
    pub paused_ms: u64,
    /// NBD connections that continue.
    pub connections: usize,
}

impl Upgrades {
    /// Records the end of an upgrade. `count` is the number of upgrades of this process.
    pub fn complete(&self, count: u64, outcome: UpgradeOutcome) {
        *self.last.lock() = (count, Some(outcome));
    }

    /// Returns the number of upgrades of this process, and the result of the last one.
    pub fn last(&self) -> (u64, Option<UpgradeOutcome>) {
        self.last.lock().clone()
    }
}
