//! Exports: published devices and templates.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use freestone_core::concurrency_limit::ConcurrencyLimit;
use freestone_core::device::{Device, Failures, Geometry};

use crate::address::Address;
use crate::link::Link;
use crate::proto::TransmissionFlags;
use crate::shared::template::{DeviceInfo, EndCallback, Template};

/// Options for publishing a device.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// True if writes are refused even if the device accepts them.
    pub read_only: bool,
    /// True for the default export of its address, which the empty name selects.
    pub default: bool,
    /// True if FUA is neither offered nor accepted, so that clients flush instead.
    pub without_fua: bool,
    /// The clients that can see the export.
    pub visible_to: Visibility,
    /// Description for users, at most 4096 bytes; may be empty.
    pub description: String,
    /// Counters of failed requests, shared by all exports of a device, or by all connections to a template.
    pub failures: Arc<Failures>,
    /// Client limits, in each of which a connection takes a place. If a limit is full, the handshake waits
    /// until shortly before its deadline.
    pub places: Vec<Arc<ConcurrencyLimit>>,
}

/// The clients that can see an export. Other clients get an error: TLS required if they do not use TLS, else
/// unknown export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Visibility {
    /// All clients.
    #[default]
    All,
    /// Clients with TLS.
    Tls,
    /// Clients whose certificate has one of these names.
    Certificates(Arc<[String]>),
}

/// Options for publishing a template.
#[derive(Debug, Clone, Default)]
pub struct TemplateOptions {
    /// Options that templates share with devices.
    pub export: ExportOptions,
    /// Longest lifetime of a connection, counted from the creation of its device. Then the connection
    /// completes the requests it has received and ends. It is cut if it has not ended after another
    /// [`SHUTDOWN_GRACE`](crate::SHUTDOWN_GRACE). `None`: no limit.
    pub ttl: Option<Duration>,
}

/// Why a client cannot use an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinError {
    /// No export of this name exists at the client's address.
    Unknown,
    /// The server is shutting down.
    ShuttingDown,
    /// The export needs TLS.
    TlsRequired,
    /// The client limit is reached; the value is the limit.
    ClientLimit(u64),
    /// No device is available. The value is the message for the client.
    Failed(String),
}

impl JoinError {
    /// Returns the message for the client.
    pub fn into_message(self) -> Cow<'static, str> {
        match self {
            Self::Unknown => "no such export here".into(),
            Self::ShuttingDown => "the server is shutting down".into(),
            Self::TlsRequired => "this export requires TLS (nbds://)".into(),
            Self::ClientLimit(most) => format!("client limit reached: {most} (max_clients)").into(),
            Self::Failed(text) => text.into(),
        }
    }
}

/// Properties of an export, from [`Server::exports`](crate::Server::exports).
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The export name.
    pub name: String,
    /// The address at which the export is published.
    pub address: Address,
    /// True if writes are refused, by option or because the device is read-only. For a template, by option
    /// only.
    pub read_only: bool,
    /// True for the default export of the address.
    pub default: bool,
    /// True for a template: every connection gets its own device.
    pub template: bool,
    /// True if clients must use TLS.
    pub tls: bool,
    /// Description for users; may be empty.
    pub description: String,
    /// Number of connections that use the export.
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
    /// True if writes are refused, by option or because the device is read-only.
    pub read_only: bool,
    pub default: bool,
    pub without_fua: bool,
    pub visible_to: Visibility,
    pub description: String,
    pub failures: Arc<Failures>,
    pub places: Vec<Arc<ConcurrencyLimit>>,
    /// Number of connections that use the export. Changed under the lock of the server's tables.
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
    /// Returns the template, or None if the export is a device.
    pub fn template(&self) -> Option<&Template> {
        match &self.source {
            Source::Device(_) => None,
            Source::Template(template) => Some(template),
        }
    }

    /// Returns an error if the client of this link may not see the export.
    pub fn check_visible(&self, link: &Link) -> Result<(), JoinError> {
        match (&self.visible_to, link.certificate_names()) {
            (Visibility::All, _) | (Visibility::Tls, Some(_)) => Ok(()),
            (Visibility::Tls | Visibility::Certificates(_), None) => Err(JoinError::TlsRequired),
            (Visibility::Certificates(wanted), Some(names))
                if names.iter().any(|name| wanted.contains(name)) =>
            {
                Ok(())
            }
            (Visibility::Certificates(_), Some(_)) => Err(JoinError::Unknown),
        }
    }

    /// Returns the device for a connection, and the callback for the end of the connection. The error is a
    /// message for the client.
    pub fn open(&self) -> Result<(Arc<dyn Device>, EndCallback), String> {
        match &self.source {
            Source::Device(device) => Ok((Arc::clone(device), EndCallback::default())),
            Source::Template(template) => template.open(),
        }
    }

    /// Returns the device properties for a client that has not chosen the export. The error is a message for
    /// the client.
    pub fn device_info(&self) -> Result<DeviceInfo, String> {
        match &self.source {
            Source::Device(device) => Ok(DeviceInfo::of(&**device)),
            Source::Template(template) => template.device_info(),
        }
    }

    /// Returns the transmission flags for a device of this geometry. `chunks` is true if replies are sent in
    /// chunks.
    pub fn flags(&self, geometry: &Geometry, chunks: bool) -> TransmissionFlags {
        let mut flags =
            TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_CACHE;
        // All connections to a device export use the same device, whose flush covers every completed request.
        // Each connection to a template has its own device.
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
