//! What is refused because of who uses a device.

use std::thread;
use std::time::{Duration, Instant};

use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use freestone_ublk as ublk;

use super::Exports;
use crate::control::protocol::Fault;

/// How long it may take until the server sees that a client has left, and how often it is looked.
const LEFT_MAX: Duration = Duration::from_millis(200);
const LEFT_PAUSE: Duration = Duration::from_millis(2);

impl Exports {
    /// Refuses where clients are connected. Those that have just left are waited for: the server
    /// sees that a moment later.
    pub fn check_idle(&self, entry: &Entry) -> Result<(), Fault> {
        let name = entry.name();
        let of_template = usize::from(entry.template.is_some());
        let end = Instant::now() + LEFT_MAX;
        while self.connections(name) > 0 && Instant::now() < end {
            thread::sleep(LEFT_PAUSE);
        }
        match self.users(name) + of_template {
            0 => Ok(()),
            connections => Err(in_use(name, connections)),
        }
    }

    /// Refuses to take the content away under clients: unless it is forced, and never where they
    /// count on what goes (write pointers, unflushed writes).
    pub fn check_wipe(&self, entry: &Entry, force: bool) -> Result<(), Fault> {
        if !force {
            return self.check_idle(entry);
        }
        let name = entry.name();
        let layered = entry.layers.power.is_some() || entry.layers.zones.is_some();
        if !layered || self.users(name) == 0 {
            return Ok(());
        }
        let why = "clients are connected, which cannot be told; `freestone unpublish` first";
        let what =
            if entry.layers.zones.is_some() { "it is zoned" } else { "it keeps unflushed writes apart" };
        Err(Fault::failed(Errno::EBUSY, format!("{name}: {what}, and {why}")))
    }
}

/// Why a device is left alone.
pub(super) fn in_use(name: &str, connections: usize) -> Fault {
    let who = if connections == 1 { "a client is".to_owned() } else { format!("{connections} clients are") };
    Fault::failed(Errno::EBUSY, format!("{name}: {who} connected; --force goes ahead"))
}

/// Why there is no block device, for programs.
pub(super) fn errno_of(error: &ublk::StartError) -> Errno {
    match error {
        ublk::StartError::NoDriver
        | ublk::StartError::TooOld
        | ublk::StartError::NoZones
        | ublk::StartError::ZonesOfUser
        | ublk::StartError::Unfit(_) => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}

/// Refuses what was made for one connection.
pub fn check_own(entry: &Entry) -> Result<(), Fault> {
    let Some(template) = &entry.template else { return Ok(()) };
    let why =
        format!("{}: belongs to a connection to the template {template}, and goes with it", entry.name());
    Err(Fault::failed(Errno::EBUSY, why))
}
