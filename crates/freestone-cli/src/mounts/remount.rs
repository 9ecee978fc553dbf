//! `reset` and `rewind` of a device that is mounted: unmounts, changes the content, and mounts again.
//!
//! Between the two mounts the kernel caches no block of the device: loop device, NBD client and nbdfuse are gone, and
//! the server drops the cache of a ublk device with the change. So the server refuses the change only because of other
//! clients.

use std::path::Path;

use anyhow::Result;
use serde_json::value::RawValue;

use super::mount::attach_and_mount;
use super::record::{LockedRecord, Record, Records};
use super::server::ServerState;
use super::unmounting::{Liveness, is_mounted, unmount};
use super::{control, via};
use crate::client::Common;

/// Runs `change`, which replaces the content of a device, and returns its result. A mount of the device is unmounted
/// before, and mounted again afterwards.
pub fn around(
    name: &str,
    common: &Common,
    change: &mut dyn FnMut() -> Result<Box<RawValue>>,
) -> Result<Box<RawValue>> {
    let control = control(common)?;
    let locked = Records::locate().lock(|record| is_of(record, name, &control));
    let mut locked = match locked {
        // Only root can read the records. For other users, the server refuses a change of a device in use.
        Err(_) if !rustix::process::geteuid().is_root() => return change(),
        locked => match locked? {
            None => return change(),
            Some(locked) => locked,
        },
    };
    let state = ServerState::of(&control, name);
    let liveness = Liveness::of(&locked.record, &state);
    let mut server = state.into_server(&control)?;
    let answer = while_unmounted(&locked, liveness, change);
    let dir = locked.record.dir.display().to_string();
    let mounted = if is_mounted(&locked) { Ok(()) } else { attach_and_mount(&mut locked, &mut server) };
    match (answer, mounted) {
        (answer, Ok(())) => answer,
        (Ok(_), Err(error)) => {
            let hint = format!("`freestone umount {name}` removes the rest, then mount again");
            Err(rpc_error!(
                EIO,
                "{name}: has its new content, but is not mounted at {dir}: {error:#}; {hint}"
            )
            .into())
        }
        (Err(error), Err(again)) => {
            Err(rpc_error!(EIO, "{error:#}; and {name} is not mounted at {dir} again: {again:#}").into())
        }
    }
}

/// Runs `change` while the file system is unmounted. The server writes and drops cached blocks of a ublk device, which
/// stays attached. If unmounting fails, the content is unchanged.
fn while_unmounted(
    locked: &LockedRecord,
    liveness: Liveness,
    change: &mut dyn FnMut() -> Result<Box<RawValue>>,
) -> Result<Box<RawValue>> {
    unmount(locked, liveness, false)?;
    via::detach(locked, false)?;
    change()
}

fn is_of(record: &Record, name: &str, control: &Path) -> bool {
    record.name == name && record.control == control
}
