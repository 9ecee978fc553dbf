//! The ways in which a device becomes a block device of this machine.

mod address;
mod nbd;
mod nbdfuse;
mod ublk;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};

use super::attached::{is_unused, loops_of};
use super::helper::wait_until;
use super::mount_table::MountTable;
use super::record::{LockedRecord, Via};
use super::server::{Export, Server};

/// Longest wait for other programs, such as udev, to close a block device after it was unmounted.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// Reason why a device could not be attached.
enum AttachError {
    /// A program, driver or right is missing on this machine or in the server.
    Unavailable(String),
    /// A step of attaching failed with this error.
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for AttachError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

/// Attaches the device of a record in the way that the record names, or else in the first way that is available. Saves
/// the record before each step.
pub fn attach(locked: &mut LockedRecord, server: &mut Server) -> Result<()> {
    let name = locked.record.name.clone();
    if let Some(via) = locked.record.via {
        return match attach_by(via, locked, server) {
            Ok(()) => Ok(()),
            Err(AttachError::Unavailable(why)) => bail!("{name}: {}: {why}", via.name()),
            Err(AttachError::Failed(error)) => Err(error.context(format!("{name}: {}", via.name()))),
        };
    }
    let mut reasons = Vec::new();
    for via in [Via::Ublk, Via::Nbd, Via::Nbdfuse] {
        locked.record.via = Some(via);
        match attach_by(via, locked, server) {
            Ok(()) => return Ok(()),
            Err(AttachError::Unavailable(why)) => reasons.push(format!("{}: {why}", via.name())),
            Err(AttachError::Failed(error)) => return Err(error.context(format!("{name}: {}", via.name()))),
        }
    }
    bail!("{name}: cannot become a block device: {}", reasons.join("; "))
}

fn attach_by(via: Via, locked: &mut LockedRecord, server: &mut Server) -> Result<(), AttachError> {
    match via {
        Via::Ublk => ublk::attach(locked, server),
        Via::Nbd => nbd::attach(locked, server),
        Via::Nbdfuse => nbdfuse::attach(locked, server),
    }
}

/// Disconnects the kernel from the server, after the file system was unmounted. With `force`, an nbdfuse that does not
/// end is killed without a long wait. Does not unpublish the export.
pub fn detach(locked: &LockedRecord, force: bool) -> Result<()> {
    match locked.record.via {
        Some(Via::Nbd) => nbd::detach(locked),
        Some(Via::Nbdfuse) => nbdfuse::detach(locked, force),
        // The block device belongs to the server; `unpublish` removes it.
        Some(Via::Ublk) | None => Ok(()),
    }
}

/// Returns the address of the export that the mount published, or `None` if that export no longer exists.
pub fn published(locked: &LockedRecord, server: &Server) -> Option<String> {
    let published = locked.record.published.as_deref()?;
    let exports = &server.device()?.exports;
    let matches = |export: &&Export| match published {
        ublk::UNKNOWN => export.is_ublk(),
        address => export.address == address,
    };
    exports.iter().find(matches).map(|export| export.address.clone())
}

/// Returns the file or block device to pass to mount(8), and a mount option that is required for it.
pub fn mountable(locked: &LockedRecord) -> Option<(PathBuf, Option<&'static str>)> {
    match locked.record.via? {
        // With this option, the loop device is detached at the last unmount, whoever unmounts.
        Via::Nbdfuse => Some((nbdfuse::disk(locked), Some("loop"))),
        Via::Ublk | Via::Nbd => Some((locked.record.device.clone()?, None)),
    }
}

/// Returns the block devices under which the mount table lists the device.
pub fn sources(locked: &LockedRecord, table: &MountTable) -> Vec<PathBuf> {
    let record = &locked.record;
    let mut sources = match record.via {
        Some(Via::Nbdfuse) => loops_of(&nbdfuse::disk(locked)),
        Some(Via::Nbd) if !nbd::is_connected(locked) => Vec::new(),
        Some(Via::Ublk | Via::Nbd) | None => record.device.clone().into_iter().collect(),
    };
    // The number of the block device may have been reused. A mount at the directory of the record still counts as the
    // mount of the record.
    let is_here = |device: &&PathBuf| {
        table.of(std::slice::from_ref(device)).any(|mount| mount.dir == record.dir)
            && !sources.contains(device)
    };
    let here = record.device.as_ref().filter(is_here).cloned();
    sources.extend(here);
    sources
}

/// Waits until the unmounted block device has no users. Returns false after a timeout.
pub fn wait_unused(locked: &LockedRecord) -> bool {
    wait_until(CLOSE_MAX, || match (locked.record.via, &locked.record.device) {
        // A loop device is detached with its last user, and its number may then be reused.
        (Some(Via::Nbdfuse), _) => loops_of(&nbdfuse::disk(locked)).is_empty(),
        (_, Some(device)) => is_unused(device),
        (_, None) => true,
    })
}
