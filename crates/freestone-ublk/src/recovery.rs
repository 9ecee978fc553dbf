//! Block devices that survive a killed server, and wait in the kernel for the next one.
//!
//! The driver stores no data of a server, except for 64 bits. In them, a server that wants to recover a block device
//! stores a [`RecoveryTag`], which names the device and the generation of its content. The next server
//! [finds](WaitingDevices::find) the waiting block devices, once, before it publishes devices. It keeps those
//! whose content it has, and removes its other ones before their device gets other content.
//!
//! A tag is in the driver as soon as the block device exists, so a kill at any time leaves no block device without a
//! tag. Another program, another server or an id in use by someone else has another tag.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::sync::Mutex;
use rustix::io::Errno;

use crate::kernel::Kernel;
use crate::kernel::abi::{DevInfo, state};
use crate::kernel::control::{Control, ControlError, Target, delete};
use crate::kernel::deadline::run_with_deadline;
use crate::kernel::system::System;
use crate::stale_devices::StaleDeviceError;

/// Longest time until the kernel has closed the files and rings of a server that has ended. It frees the memory of
/// the process first.
pub const RELEASE_MAX: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(10) };
/// Pause between two checks whether the kernel has closed them.
pub const RELEASE_POLL: Duration = Duration::from_millis(10);
/// Longest time for listing or removing block devices.
const DEADLINE: Duration = Duration::from_secs(20);

/// Mark of a tag in the upper eight bits of `ublksrv_flags`. Block devices of servers that do not recover them have
/// another mark there; see [`mark`](crate::kernel::control::mark).
const MARK: u64 = 0x52 << 56;
const MARK_MASK: u64 = 0xff << 56;
const OWNER_BITS: u32 = 48;
const OWNER_MASK: u64 = (1 << OWNER_BITS) - 1;

/// Names the device of a recoverable block device, and its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveryTag {
    owner: u64,
    generation: u8,
}

impl RecoveryTag {
    /// Creates a tag. `owner` is a random number of the device, of which 48 bits count. `generation` differs from
    /// that of former content of the device, modulo 256.
    pub const fn new(owner: u64, generation: u64) -> Self {
        Self { owner: owner & OWNER_MASK, generation: generation as u8 }
    }

    /// Returns the tag as `ublksrv_flags` of a block device.
    pub(crate) const fn flags(self) -> u64 {
        MARK | (self.generation as u64) << OWNER_BITS | self.owner
    }

    /// Returns the tag of a block device, or `None` for those of other programs and of other servers.
    pub(crate) const fn of(info: &DevInfo) -> Option<Self> {
        let flags = info.ublksrv_flags;
        if flags & MARK_MASK == MARK { Some(Self::new(flags, flags >> OWNER_BITS)) } else { None }
    }
}

/// How a block device survives the end of its server; see [`Options::recovery`](crate::Options::recovery).
#[derive(Debug, Clone, Copy)]
pub struct Recovery {
    /// Tag of the device.
    pub tag: RecoveryTag,
    /// Id of the block device of the former server to recover, with the same tag. If it is gone, or does not fit the
    /// device, a new block device is created.
    pub waiting: Option<u32>,
}

/// Block devices of former servers that wait for a server.
pub struct WaitingDevices {
    kernel: Arc<dyn Kernel>,
    /// Tags and ids, by the owner in the tag. The lock is held only to read or change the map.
    by_owner: Mutex<HashMap<u64, Vec<(RecoveryTag, u32)>>>,
}

impl WaitingDevices {
    /// Finds all recoverable block devices, also those of other servers.
    ///
    /// # Errors
    /// Fails if the block devices cannot be listed.
    pub fn find() -> Result<Self, StaleDeviceError> {
        Self::with(Arc::new(System::default()))
    }

    pub(crate) fn with(kernel: Arc<dyn Kernel>) -> Result<Self, StaleDeviceError> {
        let driver = Arc::clone(&kernel);
        let found = run_with_deadline(DEADLINE, "ublk-find", move || find(&*driver));
        let by_owner = Mutex::new(found?.unwrap_or(Err(StaleDeviceError::Deadline))?);
        Ok(Self { kernel, by_owner })
    }

    /// Removes the block devices of the tag's device, and returns their ids. Requests to them fail. The block device
    /// with the tag itself stays if `keeps` is set, unless there are several.
    ///
    /// # Errors
    /// Fails if a block device cannot be removed, for example because a process serves it. It is then still in the
    /// list.
    pub fn remove(&self, tag: RecoveryTag, keeps: bool) -> Result<Vec<u32>, StaleDeviceError> {
        let all = self.by_owner.lock().get(&tag.owner).cloned().unwrap_or_default();
        let is_unique = all.iter().filter(|(found, _)| *found == tag).count() == 1;
        let unwanted = all.into_iter().filter(|(found, _)| !(keeps && is_unique && *found == tag));
        let mut removed = Vec::new();
        for (found, id) in unwanted {
            let kernel = Arc::clone(&self.kernel);
            let done = run_with_deadline(DEADLINE, "ublk-remove", move || remove(&*kernel, found, id));
            done?.unwrap_or(Err(StaleDeviceError::Deadline))?;
            self.forget(tag, id);
            removed.push(id);
        }
        Ok(removed)
    }

    /// Returns the id of the block device with this tag.
    pub fn get(&self, tag: RecoveryTag) -> Option<u32> {
        self.by_owner.lock().get(&tag.owner)?.iter().find(|(found, _)| *found == tag).map(|(_, id)| *id)
    }

    /// Removes a block device from the list: it has a server now, or is gone.
    pub fn forget(&self, tag: RecoveryTag, id: u32) {
        let mut by_owner = self.by_owner.lock();
        if let Some(found) = by_owner.get_mut(&tag.owner) {
            found.retain(|(_, other)| *other != id);
        }
    }
}

impl fmt::Debug for WaitingDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitingDevices").field("by_owner", &self.by_owner.lock()).finish_non_exhaustive()
    }
}

fn find(kernel: &dyn Kernel) -> Result<HashMap<u64, Vec<(RecoveryTag, u32)>>, StaleDeviceError> {
    let mut by_owner: HashMap<u64, Vec<_>> = HashMap::new();
    let ids = kernel.devices()?;
    if !ids.is_empty()
        && let Err(Errno::NOENT | Errno::NODEV | Errno::NXIO | Errno::ACCESS | Errno::PERM) = kernel.check()
    {
        // A container shows the machine's block devices, but may not use the driver.
        return Ok(by_owner);
    }
    for id in ids {
        match Control(kernel).info(id) {
            Ok(info) => {
                if let Some(tag) = RecoveryTag::of(&info) {
                    by_owner.entry(tag.owner).or_default().push((tag, id));
                }
            }
            // Devices of other users, or devices removed in the meantime.
            Err(ControlError { errno: Errno::NODEV | Errno::ACCESS | Errno::PERM, .. }) => {}
            Err(source) => return Err(StaleDeviceError::Control { id, source }),
        }
    }
    Ok(by_owner)
}

/// Removes a block device that had this tag, after its server has ended.
fn remove(kernel: &dyn Kernel, tag: RecoveryTag, id: u32) -> Result<(), StaleDeviceError> {
    let failed = |source| StaleDeviceError::Control { id, source };
    let (control, end) = (Control(kernel), Instant::now() + RELEASE_MAX);
    loop {
        if find_tagged(&control, tag, id).map_err(failed)?.is_none() {
            return Ok(());
        }
        let hold = kernel.open(id, Instant::now());
        // The id may have been reused before the open, so the block device is checked again.
        let Some(info) = find_tagged(&control, tag, id).map_err(failed)? else { return Ok(()) };
        let target = Target::new(id, info.flags);
        match hold {
            // The kernel refuses a second open, so the server has ended.
            Ok(hold) => return delete(&control, target, hold).map_err(failed),
            // Without a server, a node that cannot be opened does not matter.
            Err(_) if info.state != state::LIVE => return delete(&control, target, ()).map_err(failed),
            Err(_) if Instant::now() >= end => return Err(StaleDeviceError::Served(id)),
            Err(_) => thread::sleep(RELEASE_POLL),
        }
    }
}

/// Returns the information about block device `id`, or `None` if it is gone or has another tag.
pub fn find_tagged(
    control: &Control<'_>,
    tag: RecoveryTag,
    id: u32,
) -> Result<Option<DevInfo>, ControlError> {
    match control.info(id) {
        Ok(info) => Ok(Some(info).filter(|info| RecoveryTag::of(info) == Some(tag))),
        Err(ControlError { errno: Errno::NODEV, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::control::{creator_pid, mark};

    #[test]
    fn tag_is_read_back_and_differs_from_the_mark() {
        let tag = RecoveryTag::new(u64::MAX - 5, 0x1234);
        let info = |flags| DevInfo { ublksrv_flags: flags, ..DevInfo::default() };
        assert_eq!(RecoveryTag::of(&info(tag.flags())), Some(tag));
        assert_eq!(RecoveryTag::new(u64::MAX - 5, 0x34), tag);
        assert_ne!(RecoveryTag::new(u64::MAX - 5, 0x35), tag);
        assert_ne!(RecoveryTag::new(u64::MAX - 6, 0x34), tag);
        for flags in [0, 1, u64::from(u32::MAX), mark(7)] {
            assert_eq!(RecoveryTag::of(&info(flags)), None, "{flags:#x}");
        }
        // Servers that remove stale devices ignore those that wait.
        assert_eq!(creator_pid(&info(tag.flags())), None);
    }
}
