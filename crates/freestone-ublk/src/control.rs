//! The control device: one method for each command.

use std::os::unix::ffi::OsStringExt as _;

use rustix::io::Errno;
use thiserror::Error;
use zerocopy::IntoBytes;

use crate::abi::{CtrlCmd, DevInfo, MAX_ID, Params, control, feature};
use crate::kernel::Kernel;

/// In the upper half of what the driver keeps for a server: the device is one of ours. In the lower
/// half is the process, as the driver forgets that when it ends.
const OURS: u64 = 0x4672_6565 << 32;
const OURS_MASK: u64 = 0xffff_ffff << 32;

/// A command that the driver has refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{command}: {errno}")]
pub struct ControlError {
    /// Which command, by the kernel's name.
    pub command: &'static str,
    /// Why, by the kernel's number.
    pub errno: Errno,
}

/// A device, as commands name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its number.
    pub id: u32,
    /// Commands carry the path of its character device, to which the kernel looks for what the caller
    /// may do: it is a user's without privileges.
    pub by_path: bool,
}

impl Target {
    /// The device with these [`feature`]s.
    pub fn new(id: u32, features: u64) -> Self {
        Self { id, by_path: features & feature::UNPRIVILEGED_DEV != 0 }
    }

    /// One that there is not yet.
    const NONE: Self = Self { id: u32::MAX, by_path: false };
}

/// Commands, each of which returns when it is done.
pub struct Control<'a>(pub &'a dyn Kernel);

impl Control<'_> {
    fn command(
        &self,
        name: &'static str,
        command: u32,
        target: Target,
        data: u64,
        payload: &mut [u8],
    ) -> Result<(), ControlError> {
        tracing::debug!(id = target.id, data, "ublk: {name}");
        let failed = |errno| ControlError { command: name, errno };
        let header = CtrlCmd::new(target.id, data);
        if !target.by_path {
            return self.0.command(command, header, payload).map_err(failed);
        }
        let mut whole = self.0.char_path(target.id).into_os_string().into_vec();
        whole.push(0);
        let path = whole.len();
        whole.extend_from_slice(payload);
        let header = CtrlCmd { dev_path_len: path as u16, ..header };
        let done = self.0.command(command, header, &mut whole);
        payload.copy_from_slice(&whole[path..]);
        done.map_err(failed)
    }

    /// The bits of [`feature`] that the driver has. Drivers before Linux 6.5 refuse the question.
    pub fn features(&self) -> Result<u64, ControlError> {
        let mut features = 0_u64;
        let answer = features.as_mut_bytes();
        self.command("GET_FEATURES", control::GET_FEATURES, Target::NONE, 0, answer)?;
        Ok(features)
    }

    /// Makes a device with any free id. Of what is asked for, the answer has what the driver grants.
    pub fn add(&self, asked: DevInfo) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo { dev_id: u32::MAX, ..asked };
        self.command("ADD_DEV", control::ADD_DEV, Target::NONE, 0, info.as_mut_bytes())?;
        Ok(info)
    }

    /// What the device is; before it is started.
    pub fn set_params(&self, target: Target, params: &Params) -> Result<(), ControlError> {
        let mut params = *params;
        self.command("SET_PARAMS", control::SET_PARAMS, target, 0, params.as_mut_bytes())
    }

    /// Shows the block device, once every tag was fetched; its partitions are looked for before this
    /// returns, unless it is a user's without privileges.
    pub fn start(&self, target: Target, pid: u32) -> Result<(), ControlError> {
        self.command("START_DEV", control::START_DEV, target, pid.into(), &mut [])
    }

    /// Takes the block device away once its requests are done, and gives all tags back.
    pub fn stop(&self, target: Target) -> Result<(), ControlError> {
        self.command("STOP_DEV", control::STOP_DEV, target, 0, &mut [])
    }

    /// The same, unless somebody has it open: [`Errno::BUSY`]. Needs [`feature::SAFE_STOP_DEV`].
    pub fn try_stop(&self, target: Target) -> Result<(), ControlError> {
        self.command("TRY_STOP_DEV", control::TRY_STOP_DEV, target, 0, &mut [])
    }

    /// Removes the device, without waiting for those that have a node of it open. Linux 6.9 has it.
    pub fn delete(&self, target: Target) -> Result<(), ControlError> {
        self.command("DEL_DEV_ASYNC", control::DEL_DEV_ASYNC, target, 0, &mut [])
    }

    /// The same with waiting.
    pub fn delete_and_wait(&self, target: Target) -> Result<(), ControlError> {
        self.command("DEL_DEV", control::DEL_DEV, target, 0, &mut [])
    }

    /// Gives it another size. Needs [`feature::UPDATE_SIZE`].
    pub fn set_size(&self, target: Target, sectors: u64) -> Result<(), ControlError> {
        self.command("UPDATE_SIZE", control::UPDATE_SIZE, target, sectors, &mut [])
    }

    /// A device, whosever it is.
    pub fn info(&self, id: u32) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo::default();
        // This one takes the path for all devices, as who asks does not know yet.
        let target = Target { id, by_path: true };
        let known = self.command("GET_DEV_INFO2", control::GET_DEV_INFO2, target, 0, info.as_mut_bytes());
        if let Err(ControlError { errno: Errno::NOENT, .. }) = known {
            // There is no node; then it is root's, or nobody's to look at.
            let target = Target { id, by_path: false };
            self.command("GET_DEV_INFO", control::GET_DEV_INFO, target, 0, info.as_mut_bytes())?;
            return Ok(info);
        }
        known.map(|()| info)
    }
}

/// Bits that are asked for where the driver has them.
///
/// Who has `CAP_SYS_ADMIN` is not granted the device of a user without privileges, and who has not can
/// make no other.
pub const WANTED_FEATURES: u64 = feature::UNPRIVILEGED_DEV | feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;

/// Removes a device; lets go of `hold`, which keeps its id from being another's, as late as may be.
pub fn delete<T>(control: &Control<'_>, target: Target, hold: T) -> Result<(), ControlError> {
    let deleted = match control.delete(target) {
        Err(ControlError { errno: Errno::OPNOTSUPP | Errno::INVAL, .. }) => {
            drop(hold);
            control.delete_and_wait(target)
        }
        deleted => deleted,
    };
    match deleted {
        // It is gone already.
        Err(ControlError { errno: Errno::NODEV, .. }) => Ok(()),
        deleted => deleted,
    }
}

/// What the driver keeps for a device of process `pid`.
pub fn mark(pid: u32) -> u64 {
    OURS | u64::from(pid)
}

/// The process that made a device of ours; `None`: it is somebody else's.
pub fn maker(info: &DevInfo) -> Option<u32> {
    (info.ublksrv_flags & OURS_MASK == OURS).then_some(info.ublksrv_flags as u32)
}

/// Whether the driver can have given this id.
pub fn is_id(id: u32) -> bool {
    id < MAX_ID
}
