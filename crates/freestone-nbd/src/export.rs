//! Exports: published devices and templates.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use freestone_core::device::{Device, Failures, Geometry};
use freestone_core::places::Places;

use crate::address::Address;
use crate::link::Link;
use crate::proto::TransmissionFlags;
use crate::template::{Facts, OnEnd, Template};

/// Options for publishing a device.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Refuses writes, even if the device accepts them.
    pub read_only: bool,
    /// Makes this the default export of its address, which the empty name selects.
    pub default: bool,
    /// Neither offers nor accepts FUA, so clients flush instead.
    pub without_fua: bool,
    /// The clients that can see the export.
    pub clients: Clients,
    /// Description for users, at most 4096 bytes; may be empty.
    pub description: String,
    /// Counters of failed requests, shared by all exports of a device or all connections of a template.
    pub failures: Arc<Failures>,
    /// Limits in which each connection takes a place. If one is full, the handshake waits until its time is
    /// up.
    pub places: Vec<Arc<Places>>,
}

/// Which clients see an export. For other clients it does not exist.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Clients {
    /// All clients.
    #[default]
    All,
    /// Clients with TLS.
    Secure,
    /// Clients whose certificate has one of these names.
    Named(Arc<[String]>),
}

/// Options for publishing a template.
#[derive(Debug, Clone, Default)]
pub struct TemplateOptions {
    /// Options shared with devices.
    pub export: ExportOptions,
    /// Longest lifetime of a connection, from the creation of its device. Then the connection completes the
    /// requests it has received and ends; it is cut after another [`END_GRACE`](crate::END_GRACE). `None`
    /// sets no limit.
    pub ttl: Option<Duration>,
}

/// Why a client cannot use an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnterError {
    /// No export of this name exists at the client's address.
    Unknown,
    /// The server is shutting down.
    ShuttingDown,
    /// The export needs TLS.
    OnlyByTls,
    /// The client limit is reached; the value is the limit.
    Full(u64),
    /// No device is available, with the message for the client.
    Failed(String),
}

/// Properties of an export, from [`Server::exports`](crate::Server::exports).
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The export name.
    pub name: String,
    /// The address at which it is published.
    pub address: Address,
    /// True if writes are refused, by option or by the device. For a template, by option only.
    pub read_only: bool,
    /// True for the default export of the address.
    pub default: bool,
    /// True if every connection gets its own device.
    pub template: bool,
    /// True if clients must use TLS.
    pub tls: bool,
    /// Description for users.
    pub description: String,
    /// Current connections.
    pub connections: usize,
}

/// The peer of a connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    /// A process on this machine, by its pid.
    Process(i32),
    /// Any other peer, as shown in logs.
    Peer(String),
}

impl ExportInfo {
    /// Returns the URI of the export, see [`Address::uri`]. The scheme is `nbds` if TLS is required.
    pub fn uri(&self) -> String {
        self.address.uri_by(&self.name, self.tls)
    }
}

/// A device or a template, published under a name at one address.
pub struct Export {
    pub name: String,
    pub address: Address,
    pub source: Source,
    /// Refuses writes, by option or because the device is read-only.
    pub read_only: bool,
    pub default: bool,
    pub without_fua: bool,
    pub clients: Clients,
    pub description: String,
    pub failures: Arc<Failures>,
    pub places: Vec<Arc<Places>>,
    /// Current connections; changed under the server's lock.
    pub users: AtomicUsize,
}

/// The source of an export's device.
pub enum Source {
    /// One device for all connections.
    Device(Arc<dyn Device>),
    /// Creates a device for each connection.
    Template(Template),
}

impl Export {
    /// Returns the template, or None for a device.
    pub fn template(&self) -> Option<&Template> {
        match &self.source {
            Source::Device(_) => None,
            Source::Template(template) => Some(template),
        }
    }

    /// Checks that the client of this link may see the export.
    pub fn admit(&self, link: &Link) -> Result<(), EnterError> {
        match (&self.clients, link.client()) {
            (Clients::All, _) | (Clients::Secure, Some(_)) => Ok(()),
            (Clients::Secure | Clients::Named(_), None) => Err(EnterError::OnlyByTls),
            (Clients::Named(wanted), Some(names)) if names.iter().any(|name| wanted.contains(name)) => Ok(()),
            (Clients::Named(_), Some(_)) => Err(EnterError::Unknown),
        }
    }

    /// Returns the device for a connection and the call for its end. The error is a message for the client.
    pub fn open(&self) -> Result<(Arc<dyn Device>, OnEnd), String> {
        match &self.source {
            Source::Device(device) => Ok((Arc::clone(device), OnEnd::default())),
            Source::Template(template) => template.open(),
        }
    }

    /// Returns the properties for a client that has not chosen the export. The error is a message for the
    /// client.
    pub fn facts(&self) -> Result<Facts, String> {
        match &self.source {
            Source::Device(device) => Ok(Facts::of(&**device)),
            Source::Template(template) => template.facts(),
        }
    }

    /// Returns the transmission flags for a device of this geometry. `chunks` says if replies have chunks.
    pub fn flags(&self, geometry: &Geometry, chunks: bool) -> TransmissionFlags {
        let mut flags =
            TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_CACHE;
        // All connections use the same device, and its flush covers every completed request. A second
        // connection to a template would use another device.
        flags.set(TransmissionFlags::CAN_MULTI_CONN, self.template().is_none());
        if self.read_only || geometry.read_only {
            flags |= TransmissionFlags::READ_ONLY;
        } else {
            flags |= TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
            flags.set(TransmissionFlags::SEND_TRIM, geometry.discard_granularity != 0);
        }
        flags.set(TransmissionFlags::SEND_FUA, !self.without_fua);
        flags.set(TransmissionFlags::ROTATIONAL, geometry.rotational);
        flags.set(TransmissionFlags::SEND_DF, chunks);
        flags
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name, self.address)
    }
}
