//! Exports outside of the NBD server, each for one device: a vhost-user-blk socket or a ublk block device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use freestone_spec::limits::LimitSpec;
use freestone_spec::path_text;
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;
use tracing::warn;

use crate::limited::Limited;
use crate::places::{Place, Wanted};

/// A vhost-user-blk or ublk export.
pub enum Alone {
    /// A vhost-user-blk socket.
    VhostUser(vhost_user::Export),
    /// A block device of this machine.
    Ublk(ublk::Export),
}

/// A new export.
pub enum Shown {
    /// An NBD export at this address. A port 0 has been replaced by the chosen port.
    Nbd(Address),
    /// A vhost-user-blk or ublk export.
    Alone(Arc<Alone>),
}

/// Guard that holds new clients (vhost-user) or new requests (ublk) of an export.
pub enum HeldExport<'a> {
    VhostUser(vhost_user::Held<'a>),
    Ublk(ublk::Held<'a>),
}

impl Alone {
    /// Returns the address: `vhost-user:PATH` or `/dev/ublkbN`.
    pub fn address(&self) -> String {
        match self {
            Self::VhostUser(export) => format!("vhost-user:{}", path_text::text(export.path())),
            Self::Ublk(export) => path_text::text(export.path()),
        }
    }

    /// Returns the specification of the export, without limits.
    pub fn wanted(&self) -> Wanted {
        let place = match self {
            Self::VhostUser(export) => Place::VhostUser(export.path().to_owned()),
            Self::Ublk(export) => Place::Ublk(export.queues()),
        };
        let allow = match self {
            Self::VhostUser(export) => export.allow(),
            Self::Ublk(_) => None,
        };
        Wanted { place, read_only: self.is_read_only(), allow, limits: LimitSpec::default() }
    }

    /// Returns true if clients cannot write.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_read_only(),
            Self::Ublk(export) => export.is_read_only(),
        }
    }

    /// Returns true if a virtual machine is connected, or the block device is mounted or otherwise in use.
    pub fn is_used(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_connected(),
            Self::Ublk(export) => export.is_connected(),
        }
    }

    /// Returns true if a virtual machine is connected whose driver may have cached content.
    pub fn is_driven(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_driven(),
            Self::Ublk(_) => false,
        }
    }

    /// Returns the number of connections. Returns 0 for a block device: finding out needs an exclusive open
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

    /// Replaces the exported device.
    pub fn replace(&self, new: &Entry, limited: Option<&Limited>) {
        let Some(device) = new.way() else { return };
        if let Some(Err(error)) = limited.map(|limited| limited.join(&device)) {
            warn!("{}: limits are not enforced: cannot start a thread: {error}", self.address());
        }
        device.tally().set_place(&self.address());
        let failures = Arc::clone(&new.failures);
        match self {
            Self::VhostUser(export) => export.replace(device, failures),
            Self::Ublk(export) => export.replace(device, failures),
        }
    }

    /// Announces a new size of the device to clients.
    pub fn resized(&self) {
        match self {
            Self::VhostUser(export) => export.resized(),
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
            Self::VhostUser(export) => export.begin_to_end(),
            Self::Ublk(export) => export.begin_to_end(),
        }
    }

    /// Ends the export and waits for it. Returns false if requests are still in flight after `grace`.
    pub fn end(&self, grace: Duration) -> bool {
        match self {
            Self::VhostUser(export) => export.end(grace),
            Self::Ublk(export) => export.end(grace),
        }
    }
}

impl HeldExport<'_> {
    /// Cuts clients off like a loss of power. Returns true if a connection ended.
    pub fn cut(&self) -> bool {
        match self {
            Self::VhostUser(held) => held.cut(),
            Self::Ublk(held) => {
                // Fails the requests that have arrived. The block device remains.
                held.cut();
                false
            }
        }
    }

    /// Waits until the device has no requests of the export in flight. Returns false if it has some at `end`.
    pub fn wait_gone(&self, end: Instant) -> bool {
        match self {
            Self::VhostUser(held) => held.wait_gone(end),
            Self::Ublk(held) => held.wait_gone(end),
        }
    }
}

/// Ends all exports at the same time. An export with requests in flight after `grace` releases its device
/// later.
pub fn end_all(exports: &[Arc<Alone>], grace: Duration) {
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
