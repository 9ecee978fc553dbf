//! Exports outside of the NBD server, each for one device: a vhost-user-blk socket or a ublk block device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_nbd::AllowList;
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;
use tracing::warn;

use crate::exports::export_limits::ExportLimits;
use crate::exports::export_spec::ExportAddress;

/// A vhost-user-blk or ublk export.
pub enum StandaloneExport {
    /// A vhost-user-blk socket.
    VhostUser(vhost_user::Export),
    /// A ublk block device of this machine.
    Ublk(ublk::Export),
}

/// Guard that holds new clients (vhost-user) or new requests (ublk) of an export.
pub enum HeldExport<'a> {
    VhostUser(vhost_user::FrontendHold<'a>),
    Ublk(ublk::RequestHold<'a>),
}

impl StandaloneExport {
    /// Returns the address: `vhost-user:PATH` or `/dev/ublkbN`.
    pub fn address(&self) -> String {
        match self {
            Self::VhostUser(export) => format!("vhost-user:{}", path_text::text(export.path())),
            Self::Ublk(export) => path_text::text(export.path()),
        }
    }

    /// Returns the address as in a specification.
    pub fn place(&self) -> ExportAddress {
        match self {
            Self::VhostUser(export) => ExportAddress::VhostUser(export.path().to_owned()),
            Self::Ublk(export) => ExportAddress::Ublk(export.queues()),
        }
    }

    /// Returns the allow list of a vhost-user socket.
    pub fn allow_list(&self) -> Option<AllowList> {
        match self {
            Self::VhostUser(export) => export.allow_list(),
            Self::Ublk(_) => None,
        }
    }

    /// Returns true if clients cannot write.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_read_only(),
            Self::Ublk(export) => export.is_read_only(),
        }
    }

    /// Returns true if a virtual machine is connected, or the block device is mounted or otherwise in use.
    pub fn is_in_use(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_connected(),
            Self::Ublk(export) => export.is_connected(),
        }
    }

    /// Returns true if a virtual machine is connected whose driver may have cached content.
    pub fn is_driven(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.has_driver(),
            Self::Ublk(_) => false,
        }
    }

    /// Returns the number of connections. Returns 0 for a ublk block device: a check needs an exclusive open
    /// of the device, which could make an open by another program fail.
    pub fn connections(&self) -> usize {
        match self {
            Self::VhostUser(export) => export.is_connected().into(),
            Self::Ublk(_) => 0,
        }
    }

    /// Holds new clients (vhost-user) or new requests (ublk) until the guard is dropped.
    pub fn hold(&self) -> HeldExport<'_> {
        match self {
            Self::VhostUser(export) => HeldExport::VhostUser(export.hold()),
            Self::Ublk(export) => HeldExport::Ublk(export.hold()),
        }
    }

    /// Replaces the exported device with `new`, and applies the limits `limited` to it.
    pub fn replace(&self, new: &Entry, limited: &ExportLimits) {
        let Some(device) = new.new_access_path() else { return };
        if let Err(error) = limited.join(&device) {
            warn!("{}: limits are not enforced: cannot start a thread: {error}", self.address());
        }
        device.tally().set_address(&self.address());
        let failures = Arc::clone(&new.failures);
        match self {
            Self::VhostUser(export) => export.replace(device, failures),
            Self::Ublk(export) => export.replace(device, failures),
        }
    }

    /// Announces the new size of the device to the clients of the export.
    pub fn announce_size(&self) {
        match self {
            Self::VhostUser(export) => export.notify_resize(),
            Self::Ublk(export) => {
                if let Err(error) = export.resize() {
                    warn!("{}: keeps its old size: {error}", export.path().display());
                }
            }
        }
    }

    /// Ends the export in the background, after the requests in flight have completed.
    pub fn begin_to_end(&self) {
        match self {
            Self::VhostUser(export) => export.begin_shutdown(),
            Self::Ublk(export) => export.begin_shutdown(),
        }
    }

    /// Ends the export in the background like [`begin_to_end`](Self::begin_to_end), but leaves a recoverable block
    /// device in the kernel for the next server.
    pub fn begin_to_leave(&self) {
        match self {
            Self::VhostUser(export) => export.begin_shutdown(),
            Self::Ublk(export) => export.begin_leave(),
        }
    }

    /// Ends the export and waits until it has ended. Returns false if requests are still in flight after
    /// `grace`.
    pub fn end(&self, grace: Duration) -> bool {
        match self {
            Self::VhostUser(export) => export.shutdown(grace),
            Self::Ublk(export) => export.shutdown(grace),
        }
    }
}

impl HeldExport<'_> {
    /// Disconnects clients as a loss of power does. Returns true if a connection ended.
    pub fn cut(&self) -> bool {
        match self {
            Self::VhostUser(held) => held.disconnect(),
            Self::Ublk(held) => {
                // Fails the requests that have arrived. The block device remains.
                held.fail_requests();
                false
            }
        }
    }

    /// Waits until no request of the export is in flight in the device. Returns false if a request still is
    /// at `end`.
    pub fn wait_gone(&self, end: Instant) -> bool {
        match self {
            Self::VhostUser(held) => held.wait_disconnected(end),
            Self::Ublk(held) => held.wait_idle(end),
        }
    }
}

/// Ends all exports in parallel. An export with requests in flight after `grace` releases its device when
/// they complete.
pub fn end_all(exports: &[Arc<StandaloneExport>], grace: Duration) {
    for export in exports {
        export.begin_to_end();
    }
    let end = Instant::now() + grace;
    for export in exports {
        if !export.end(end.saturating_duration_since(Instant::now())) {
            warn!("{}: requests are still in flight", export.address());
        }
    }
}
