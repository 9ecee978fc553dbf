//! Where a device is to be seen now, as verbs tell it.

use freestone_nbd::{Address, AllowList, ExportInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::allow::words;
use crate::alone::Alone;

/// Where a device is published.
#[derive(Debug, Serialize, Deserialize)]
pub struct Export {
    /// `unix:PATH`, `tcp:HOST:PORT`, `vhost-user:PATH` or `/dev/ublkbN`.
    pub address: String,
    /// What an NBD client is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// Clients cannot write there.
    pub read_only: bool,
    /// Also found under the empty name.
    pub default: bool,
    /// Every connection gets a fork of its own.
    pub template: bool,
    /// Open connections.
    pub connections: usize,
    /// Who may connect, where not all may who can.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// What it lets through, where that is limited: by key, 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Value>,
}

impl Export {
    /// What a client is given.
    pub fn place(&self) -> &str {
        self.uri.as_ref().unwrap_or(&self.address)
    }
}

impl Export {
    /// An export of the NBD server at an address with this list.
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
