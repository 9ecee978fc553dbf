//! Exports in the results of verbs.

use freestone_nbd::{Address, AllowList, ExportInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::exports::LiveExport;
use crate::settings::allow::words;

/// An export of a device, as verbs return it in JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Export {
    /// Address: `unix:PATH`, `tcp:HOST:PORT`, `vhost-user:PATH` or `/dev/ublkbN`.
    pub address: String,
    /// URI for NBD clients. `None` if the export is local (vhost-user or ublk) or on standard
    /// input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// True if clients cannot write.
    pub read_only: bool,
    /// True if the export is also available under the empty name, as the default export of its
    /// address.
    pub default: bool,
    /// True if the export is a template: the server creates a fork for each connection.
    pub template: bool,
    /// Number of open connections.
    pub connections: usize,
    /// Entries of the allow list. Empty if every client may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Values of the limits by key; 0 means unlimited. `None` if the export has no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Value>,
}

impl Export {
    /// Returns the URI, or the address if the export has no URI.
    pub fn place(&self) -> &str {
        self.uri.as_ref().unwrap_or(&self.address)
    }
    /// Returns the description of an NBD export. `allow` is the allow list of its address.
    pub fn of_nbd(info: &ExportInfo, allow: Option<&AllowList>, limits: Option<Value>) -> Self {
        Self {
            address: info.address.to_string(),
            uri: (info.address != Address::Stdin).then(|| info.uri()),
            read_only: info.read_only,
            default: info.default,
            template: info.template,
            connections: info.connections,
            allow: allow.map(words).unwrap_or_default(),
            limits,
        }
    }

    /// Returns the description of a vhost-user or ublk export, or `None` for an export of the NBD server.
    pub fn of_standalone(live: &LiveExport) -> Option<Self> {
        let export = live.standalone.as_ref()?;
        Some(Self {
            address: export.address(),
            uri: None,
            read_only: live.read_only,
            default: false,
            template: false,
            connections: export.connections(),
            allow: export.allow_list().as_ref().map(words).unwrap_or_default(),
            limits: live.limits.limits().stat(),
        })
    }
}
