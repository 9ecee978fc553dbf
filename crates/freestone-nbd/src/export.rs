//! What is published.

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

/// How a device is published.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Writes are refused, also where the device takes them.
    pub read_only: bool,
    /// The export also answers to the empty name at its address.
    pub default: bool,
    /// FUA is not offered and is refused: clients flush instead.
    pub without_fua: bool,
    /// Who sees it at all.
    pub clients: Clients,
    /// A text for people, at most 4096 bytes; may be empty.
    pub description: String,
    /// Where requests that fail are counted: of a device that is published more than once, all in
    /// one; of a template, those of all connections.
    pub failures: Arc<Failures>,
    /// Each connection takes a place in all of these; one that finds none waits for it while the
    /// handshake may last.
    pub places: Vec<Arc<Places>>,
}

/// Who sees an export. To others it is as if there were none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Clients {
    /// Whoever connects.
    #[default]
    All,
    /// Whoever comes by TLS.
    Secure,
    /// Whose certificate has one of these names.
    Named(Arc<[String]>),
}

/// How a template is published.
#[derive(Debug, Clone, Default)]
pub struct TemplateOptions {
    /// As for a device.
    pub export: ExportOptions,
    /// A connection that is older, counted from when its device was made, ends: what it has sent is
    /// answered, and what takes longer than [`END_GRACE`](crate::END_GRACE) beyond is cut. `None`:
    /// it may stay.
    pub ttl: Option<Duration>,
}

/// Why a client gets no export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnterError {
    /// There is none of the name at the client's address.
    Unknown,
    /// The server is going away.
    ShuttingDown,
    /// It is there for who comes by TLS.
    OnlyByTls,
    /// No place came free; so many there are.
    Full(u64),
    /// No device could be made for it; a sentence.
    Failed(String),
}

/// What [`Server::exports`](crate::Server::exports) tells of an export.
#[expect(clippy::struct_excessive_bools, reason = "each is told for itself")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its name.
    pub name: String,
    /// Where it is seen.
    pub address: Address,
    /// Whether writes are refused, by option or by the device; of a template, by option.
    pub read_only: bool,
    /// Whether it answers to the empty name.
    pub default: bool,
    /// Whether every connection gets a device of its own.
    pub template: bool,
    /// Clients have to come by TLS.
    pub tls: bool,
    /// The text for people.
    pub description: String,
    /// Connections that use it now.
    pub connections: usize,
}

impl ExportInfo {
    /// The URI with which a client reaches it, see [`Address::uri`]; `nbds` where it has to be.
    pub fn uri(&self) -> String {
        self.address.uri_by(&self.name, self.tls)
    }
}

/// A device, or a template, under a name at one address.
pub struct Export {
    /// Its name.
    pub name: String,
    /// Where it is seen.
    pub address: Address,
    /// What clients get.
    pub source: Source,
    /// By option or by the device.
    pub read_only: bool,
    /// Answers to the empty name.
    pub default: bool,
    /// See [`ExportOptions::without_fua`].
    pub without_fua: bool,
    /// See [`ExportOptions::clients`].
    pub clients: Clients,
    /// For people.
    pub description: String,
    /// Requests that failed.
    pub failures: Arc<Failures>,
    /// See [`ExportOptions::places`].
    pub places: Vec<Arc<Places>>,
    /// Connections that use it; changed under the server's lock.
    pub users: AtomicUsize,
}

/// Where an export's device comes from.
pub enum Source {
    /// One device for all connections.
    Device(Arc<dyn Device>),
    /// One for each.
    Template(Template),
}

impl Export {
    /// The template, where it is one.
    pub fn template(&self) -> Option<&Template> {
        match &self.source {
            Source::Device(_) => None,
            Source::Template(template) => Some(template),
        }
    }

    /// Whether the client at this link sees it; an error says why not.
    pub fn admit(&self, link: &Link) -> Result<(), EnterError> {
        match (&self.clients, link.client()) {
            (Clients::All, _) | (Clients::Secure, Some(_)) => Ok(()),
            (Clients::Secure | Clients::Named(_), None) => Err(EnterError::OnlyByTls),
            (Clients::Named(wanted), Some(names)) if names.iter().any(|name| wanted.contains(name)) => Ok(()),
            (Clients::Named(_), Some(_)) => Err(EnterError::Unknown),
        }
    }

    /// The device for a connection, and what is to be called when that has ended. An error is a
    /// sentence.
    pub fn open(&self) -> Result<(Arc<dyn Device>, OnEnd), String> {
        match &self.source {
            Source::Device(device) => Ok((Arc::clone(device), OnEnd::default())),
            Source::Template(template) => template.open(),
        }
    }

    /// What a client is told that has not chosen the export. An error is a sentence.
    pub fn facts(&self) -> Result<Facts, String> {
        match &self.source {
            Source::Device(device) => Ok(Facts::of(&**device)),
            Source::Template(template) => template.facts(),
        }
    }

    /// What clients are told that they may do with a device of this geometry, where replies have
    /// `chunks` or not.
    pub fn flags(&self, geometry: &Geometry, chunks: bool) -> TransmissionFlags {
        let mut flags =
            TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_CACHE;
        // Every connection goes straight to the one device, whose flush covers all that was
        // answered. A second connection to a template would be to another device.
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
