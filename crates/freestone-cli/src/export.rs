//! Exports in the results of verbs.

use freestone_nbd::{Address, AllowList, ExportInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::allow::words;
use crate::alone::Alone;

/// An export of a device.
#[derive(Debug, Serialize, Deserialize)]
pub struct Export {
    /// `unix:PATH`, `tcp:HOST:PORT`, `vhost-user:PATH` or `/dev/ublkbN`.
    pub address: String,
    /// URI for NBD clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// Clients cannot write.
    pub read_only: bool,
    /// The export is also available under the empty name.
    pub default: bool,
    /// Every connection gets a fork of its own.
    pub template: bool,
    /// Open connections.
    pub connections: usize,
    /// Allow list; empty if every client may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Limits by key, 0 for no limit. `None` if the export has no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Value>,
}

impl Export {
    /// Returns the URI, or else the address.
    pub fn place(&self) -> &str {
        self.uri.as_ref().unwrap_or(&self.address)
    }
}

impl Export {
    /// Returns an NBD export, at an address with this allow list.
    pub fn of_nbd(info: &ExportInfo, allow: Option<&AllowList>) -> Self {
        Self {
            address: info.address.to_string(),
            uri: (info.address != Address::Stdin).then(|| info.uri()),
            read_only: info.read_only,
            default: info.default,
            template: info.template,
            connections: info.connections,
            allow: allow.map(words).unwrap_or_default(),
            limits: None,
        }
    }
}

impl From<&Alone> for Export {
    fn from(export: &Alone) -> Self {
        Self {
            address: export.address(),
            uri: None,
            read_only: export.is_read_only(),
            default: false,
            template: false,
            connections: export.connections(),
            allow: export.wanted().allow.as_ref().map(words).unwrap_or_default(),
            limits: None,
        }
    }
}
