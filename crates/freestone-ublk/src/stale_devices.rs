//! Tracks this process's ublk devices, and removes devices that killed Freestone processes left
//! behind.

use std::collections::BTreeSet;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::sync::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use thiserror::Error;

use crate::kernel::Kernel;
use crate::kernel::abi::{DevInfo, state};
use crate::kernel::control::{Control, ControlError, Target, creator_pid, delete};
use crate::kernel::deadline::run_with_deadline;

/// Longest time for removing devices that were left behind.
const REMOVE_DEADLINE: Duration = Duration::from_secs(20);

/// Longest time for which the kernel shows a device as live after its server has exited. The kernel
/// closes the rings of a process asynchronously.
const CLOSE_DELAY_MAX: Duration = Duration::from_secs(1);
const CLOSE_POLL: Duration = Duration::from_millis(5);

/// Ids of this process's devices. The lock is held while a device is created, so that cleanup
/// cannot mistake a new device for a stale one.
static IDS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The entry of a device in the list of this process's devices, removed on drop.
#[derive(Debug)]
pub struct RegisteredDevice(u32);

impl RegisteredDevice {
    /// Creates a device with `make`, which returns its id, and adds the id to the list. The list
    /// stays locked during `make`.
    pub fn create<T, E>(make: impl FnOnce() -> Result<(u32, T), E>) -> Result<(T, Self), E> {
        let mut ids = IDS.lock();
        let (id, device) = make()?;
        ids.insert(id);
        Ok((device, Self(id)))
    }

    /// Adds a device of a former server to the list.
    pub fn add(id: u32) -> Self {
        IDS.lock().insert(id);
        Self(id)
    }
}

impl Drop for RegisteredDevice {
    fn drop(&mut self) {
        IDS.lock().remove(&self.0);
    }
}

/// An error from removing devices that were left behind.
#[derive(Debug, Error)]
pub enum StaleDeviceError {
    /// The devices cannot be listed.
    #[error("ublk: {0}")]
    List(#[from] io::Error),
    /// The driver rejected a command.
    #[error("ublk device {id}: {source}")]
    Control {
        /// Id of the device.
        id: u32,
        /// Error of the driver.
        source: ControlError,
    },
    /// A device that should be removed has a server.
    #[error("ublk device {0}: another server serves it")]
    Served(u32),
    /// A device was not removed in time because a process still has it open.
    #[error("ublk: devices that were left behind are still in use")]
    Deadline,
}

/// Removes devices of Freestone processes that ended without cleanup, and returns their ids.
/// Devices of other programs and devices with a running server are not removed.
pub fn remove(kernel: impl Kernel + 'static) -> Result<Vec<u32>, StaleDeviceError> {
    let removed = run_with_deadline(REMOVE_DEADLINE, "ublk-tidy", move || remove_all(&kernel));
    removed?.unwrap_or(Err(StaleDeviceError::Deadline))
}

fn remove_all(kernel: &dyn Kernel) -> Result<Vec<u32>, StaleDeviceError> {
    let control = Control(kernel);
    let mut removed = Vec::new();
    for id in kernel.devices()? {
        match remove_one(kernel, &control, id) {
            Ok(true) => removed.push(id),
            // Devices of other users, or devices removed in the meantime, are skipped.
            Ok(false) | Err(ControlError { errno: Errno::NODEV | Errno::ACCESS | Errno::PERM, .. }) => {}
            Err(source) => return Err(StaleDeviceError::Control { id, source }),
        }
    }
    Ok(removed)
}

fn remove_one(kernel: &dyn Kernel, control: &Control<'_>, id: u32) -> Result<bool, ControlError> {
    let end = Instant::now() + CLOSE_DELAY_MAX;
    loop {
        if remove_if_abandoned(kernel, control, id)? {
            return Ok(true);
        }
        if !is_server_gone(&control.info(id)?, is_running) || Instant::now() >= end {
            return Ok(false);
        }
        thread::sleep(CLOSE_POLL);
    }
}

fn remove_if_abandoned(kernel: &dyn Kernel, control: &Control<'_>, id: u32) -> Result<bool, ControlError> {
    // The list is locked after the query: a device that this process is creating has an entry by
    // then. A device with this pid and no entry belongs to an older process.
    let abandoned = || {
        let info = control.info(id)?;
        let is_abandoned = is_abandoned(&info, &IDS.lock(), is_running);
        Ok(is_abandoned.then(|| Target::new(id, info.flags)))
    };
    if abandoned()?.is_none() {
        return Ok(false);
    }
    let hold = match kernel.open(id, Instant::now()) {
        Ok(hold) => Some(hold),
        // The server is still exiting, or another process is removing the device.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => return Ok(false),
        Err(_) => None,
    };
    // The id may have been reused before the open, so the device is checked again.
    let Some(target) = abandoned()? else { return Ok(false) };
    tracing::info!("removing ublk device {id}, which a killed server left behind");
    delete(control, target, hold).map(|()| true)
}

/// Returns true if Freestone created the device and no server serves it.
fn is_abandoned(info: &DevInfo, ids: &BTreeSet<u32>, is_running: impl Fn(u32) -> bool) -> bool {
    let Some(pid) = creator_pid(info) else { return false };
    if info.state == state::LIVE {
        return false;
    }
    // Process ids repeat in containers: this process may have the pid of the old server.
    if pid == std::process::id() { !ids.contains(&info.dev_id) } else { !is_running(pid) }
}

/// Returns true if Freestone created the device and its server has exited, even if the kernel shows
/// the device as live.
fn is_server_gone(info: &DevInfo, is_running: impl Fn(u32) -> bool) -> bool {
    creator_pid(info).is_some_and(|pid| pid != std::process::id() && !is_running(pid))
}

fn is_running(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid as i32) else { return false };
    test_kill_process(pid) != Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::control::mark;

    #[test]
    fn abandoned_requires_our_mark_and_no_server() {
        let me = std::process::id();
        let device = |mark, state| DevInfo { dev_id: 3, ublksrv_flags: mark, state, ..DevInfo::default() };
        let (none, mine) = (BTreeSet::new(), BTreeSet::from([3]));
        let abandoned = |info: DevInfo, ids, runs: bool| is_abandoned(&info, ids, |_| runs);
        assert!(abandoned(device(mark(77), state::DEAD), &none, false));
        assert!(abandoned(device(mark(77), 2), &none, false), "quiesced");
        assert!(!abandoned(device(mark(77), state::DEAD), &none, true), "its server runs");
        assert!(!abandoned(device(mark(77), state::LIVE), &none, false));
        assert!(!abandoned(device(77, state::DEAD), &none, false), "another program's");
        assert!(!abandoned(device(mark(me), state::DEAD), &mine, true));
        assert!(abandoned(device(mark(me), state::DEAD), &none, true), "of a process with our number");
        assert!(is_running(me) && is_running(1));
        let goes = |mark, runs: bool| is_server_gone(&device(mark, state::LIVE), |_| runs);
        assert!(goes(mark(77), false) && !goes(mark(77), true) && !goes(77, false) && !goes(mark(me), false));
    }
}
