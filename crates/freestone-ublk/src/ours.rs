//! The devices of this process, and those that a process of ours has left when it was killed.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use thiserror::Error;

use crate::abi::{DevInfo, state};
use crate::control::{Control, ControlError, Target, delete, maker};
use crate::kernel::Kernel;
use crate::within::within;

/// How long removing what was left behind may take.
const REMOVE_DEADLINE: Duration = Duration::from_secs(20);

/// How long a device may look as if it were served when its server is gone: the kernel lets go of the
/// rings of a process after its end.
const LET_GO_MAX: Duration = Duration::from_secs(1);
const LET_GO_PAUSE: Duration = Duration::from_millis(5);

/// Ids of devices of this process. Locked while a device is made, so that nobody takes a new one for
/// one that was left behind.
static IDS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn ids() -> MutexGuard<'static, BTreeSet<u32>> {
    IDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device of this process, until it is dropped.
#[derive(Debug)]
pub struct Ours(u32);

impl Ours {
    /// The one that `make` makes, which answers its id.
    pub fn made_by<T, E>(make: impl FnOnce() -> Result<(u32, T), E>) -> Result<(T, Self), E> {
        let mut ids = ids();
        let (id, device) = make()?;
        ids.insert(id);
        Ok((device, Self(id)))
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        ids().remove(&self.0);
    }
}

/// What was left behind cannot be removed.
#[derive(Debug, Error)]
pub enum LeftBehindError {
    /// Devices cannot be looked for.
    #[error("ublk: {0}")]
    Look(#[from] io::Error),
    /// The driver refuses.
    #[error("ublk device {id}: {source}")]
    Control {
        /// Which device.
        id: u32,
        /// Why not.
        source: ControlError,
    },
    /// It takes too long: somebody still has such a device open.
    #[error("ublk: devices that were left behind are still in use")]
    Deadline,
}

/// Removes the devices whose server, a process of ours, has ended without doing so. Those of other
/// programs, and those that are served, stay. Returns the ids of what was removed.
pub fn remove(kernel: impl Kernel + 'static) -> Result<Vec<u32>, LeftBehindError> {
    let removed = within(REMOVE_DEADLINE, "ublk-tidy", move || remove_all(&kernel));
    removed?.unwrap_or(Err(LeftBehindError::Deadline))
}

fn remove_all(kernel: &dyn Kernel) -> Result<Vec<u32>, LeftBehindError> {
    let control = Control(kernel);
    let mut removed = Vec::new();
    for id in kernel.devices()? {
        match remove_one(kernel, &control, id) {
            Ok(true) => removed.push(id),
            // Not ours to touch, or gone meanwhile.
            Ok(false) | Err(ControlError { errno: Errno::NODEV | Errno::ACCESS | Errno::PERM, .. }) => {}
            Err(source) => return Err(LeftBehindError::Control { id, source }),
        }
    }
    Ok(removed)
}

fn remove_one(kernel: &dyn Kernel, control: &Control<'_>, id: u32) -> Result<bool, ControlError> {
    let end = Instant::now() + LET_GO_MAX;
    loop {
        if remove_if_left(kernel, control, id)? {
            return Ok(true);
        }
        if !is_let_go(&control.info(id)?, is_running) || Instant::now() >= end {
            return Ok(false);
        }
        thread::sleep(LET_GO_PAUSE);
    }
}

fn remove_if_left(kernel: &dyn Kernel, control: &Control<'_>, id: u32) -> Result<bool, ControlError> {
    // No device of this process is made meanwhile, so that one with its number is an older one's.
    let left = || {
        let info = control.info(id)?;
        let is_left = is_left(&info, &ids(), is_running);
        Ok(is_left.then(|| Target::new(id, info.flags)))
    };
    if left()?.is_none() {
        return Ok(false);
    }
    let hold = match kernel.open(id, Instant::now()) {
        Ok(hold) => Some(hold),
        // Its server is still about to end, or another process removes it.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => return Ok(false),
        Err(_) => None,
    };
    // Before it was open, the id may have become another device's.
    let Some(target) = left()? else { return Ok(false) };
    tracing::info!("ublk device {id} was left behind, and is removed");
    delete(control, target, hold).map(|()| true)
}

/// Whether a device is one of ours that nobody serves.
fn is_left(info: &DevInfo, ids: &BTreeSet<u32>, is_running: impl Fn(u32) -> bool) -> bool {
    let Some(pid) = maker(info) else { return false };
    if info.state == state::LIVE {
        return false;
    }
    // In a container the next server may have the number of the one before.
    if pid == std::process::id() { !ids.contains(&info.dev_id) } else { !is_running(pid) }
}

/// Whether it is one of ours that still looks as if it were served, and whose server is gone.
fn is_let_go(info: &DevInfo, is_running: impl Fn(u32) -> bool) -> bool {
    maker(info).is_some_and(|pid| pid != std::process::id() && !is_running(pid))
}

fn is_running(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid as i32) else { return false };
    test_kill_process(pid) != Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::mark;

    #[test]
    fn only_what_nobody_serves_is_left_behind() {
        let me = std::process::id();
        let device = |mark, state| DevInfo { dev_id: 3, ublksrv_flags: mark, state, ..DevInfo::default() };
        let (none, mine) = (BTreeSet::new(), BTreeSet::from([3]));
        let left = |info: DevInfo, ids, runs: bool| is_left(&info, ids, |_| runs);
        assert!(left(device(mark(77), state::DEAD), &none, false));
        assert!(left(device(mark(77), 2), &none, false), "quiesced");
        assert!(!left(device(mark(77), state::DEAD), &none, true), "its server runs");
        assert!(!left(device(mark(77), state::LIVE), &none, false));
        assert!(!left(device(77, state::DEAD), &none, false), "another program's");
        assert!(!left(device(mark(me), state::DEAD), &mine, true));
        assert!(left(device(mark(me), state::DEAD), &none, true), "of a process with our number");
        assert!(is_running(me) && is_running(1));
        let goes = |mark, runs: bool| is_let_go(&device(mark, state::LIVE), |_| runs);
        assert!(goes(mark(77), false) && !goes(mark(77), true) && !goes(77, false) && !goes(mark(me), false));
    }
}
