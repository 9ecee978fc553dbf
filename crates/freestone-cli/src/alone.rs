//! Exports of one device alone: a socket for a virtual machine, a block device of this machine.

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

/// One of these.
pub enum Alone {
    /// A socket for a virtual machine.
    VhostUser(vhost_user::Export),
    /// A block device of this machine.
    Ublk(ublk::Export),
}

/// What was made at a place.
pub enum Shown {
    /// At this address, with the port that was chosen.
    Nbd(Address),
    /// As an export of its own, which can be taken away again.
    Alone(Arc<Alone>),
}

/// Nobody new uses an export while this lives.
pub enum Held<'a> {
    VhostUser(vhost_user::Held<'a>),
    Ublk(ublk::Held<'a>),
}

impl Alone {
    /// How it is written: `vhost-user:PATH`, or `/dev/ublkbN`.
    pub fn address(&self) -> String {
        match self {
            Self::VhostUser(export) => format!("vhost-user:{}", path_text::text(export.path())),
            Self::Ublk(export) => path_text::text(export.path()),
        }
    }

    /// What was asked for, without limits.
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

    /// Whether it cannot be written.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_read_only(),
            Self::Ublk(export) => export.is_read_only(),
        }
    }

    /// Whether a machine is connected, or a block device is mounted or otherwise somebody's.
    pub fn is_used(&self) -> bool {
        match self {
            Self::VhostUser(export) => export.is_connected(),
            Self::Ublk(export) => export.is_connected(),
        }
    }

    /// Connections, as far as they can be counted without a question that others would notice: to ask
    /// whether a block device is used is to open it.
    pub fn connections(&self) -> usize {
        match self {
            Self::VhostUser(export) => export.is_connected().into(),
            Self::Ublk(_) => 0,
        }
    }

    /// See the exports' own `hold`.
    pub fn hold(&self) -> Held<'_> {
        match self {
            Self::VhostUser(export) => Held::VhostUser(export.hold()),
            Self::Ublk(export) => Held::Ublk(export.hold()),
        }
    }

    /// Shows this device from now on.
    pub fn replace(&self, new: &Entry, limited: Option<&Limited>) {
        let Some(device) = new.way() else { return };
        if let Some(Err(error)) = limited.map(|limited| limited.join(&device)) {
            warn!("{}: its limits are not kept, as a thread cannot be started: {error}", self.address());
        }
        device.tally().set_place(&self.address());
        let failures = Arc::clone(&new.failures);
        match self {
            Self::VhostUser(export) => export.replace(device, failures),
            Self::Ublk(export) => export.replace(device, failures),
        }
    }

    /// The device has another size.
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

    /// Has it end once what is in flight is done.
    pub fn begin_to_end(&self) {
        match self {
            Self::VhostUser(export) => export.begin_to_end(),
            Self::Ublk(export) => export.begin_to_end(),
        }
    }

    /// The same, and waits for that. False: it was not done after `grace`.
    pub fn end(&self, grace: Duration) -> bool {
        match self {
            Self::VhostUser(export) => export.end(grace),
            Self::Ublk(export) => export.end(grace),
        }
    }
}

impl Held<'_> {
    /// See the exports' own `cut`. Whether a connection ended by that.
    pub fn cut(&self) -> bool {
        match self {
            Self::VhostUser(held) => held.cut(),
            Self::Ublk(held) => {
                // The block device stays.
                held.cut();
                false
            }
        }
    }

    /// Waits until nothing of it is with the device. False: something is at `end`.
    pub fn wait_gone(&self, end: Instant) -> bool {
        match self {
            Self::VhostUser(held) => held.wait_gone(end),
            Self::Ublk(held) => held.wait_gone(end),
        }
    }
}

/// Ends them at the same time; what is not done after `grace` lets go of its device later.
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
