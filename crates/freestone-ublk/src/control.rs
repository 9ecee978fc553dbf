//! The control device: one method for each command.

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

/// Commands, each of which returns when it is done.
pub struct Control<'a>(pub &'a dyn Kernel);

impl Control<'_> {
    fn command(
        &self,
        name: &'static str,
        command: u32,
        header: CtrlCmd,
        payload: &mut [u8],
    ) -> Result<(), ControlError> {
        tracing::debug!(id = header.dev_id, data = header.data, "ublk: {name}");
        self.0.command(command, header, payload).map_err(|errno| ControlError { command: name, errno })
    }

    /// The bits of [`feature`] that the driver has. Drivers before Linux 6.5 refuse the question.
    pub fn features(&self) -> Result<u64, ControlError> {
        let mut features = 0_u64;
        let header = CtrlCmd::new(u32::MAX, 0);
        self.command("GET_FEATURES", control::GET_FEATURES, header, features.as_mut_bytes())?;
        Ok(features)
    }

    /// Makes a device with any free id. Of what is asked for, the answer has what the driver grants.
    pub fn add(&self, asked: DevInfo) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo { dev_id: u32::MAX, ..asked };
        let header = CtrlCmd::new(u32::MAX, 0);
        self.command("ADD_DEV", control::ADD_DEV, header, info.as_mut_bytes())?;
        Ok(info)
    }

    /// What the device is; before it is started.
    pub fn set_params(&self, id: u32, params: &Params) -> Result<(), ControlError> {
        let mut params = *params;
        self.command("SET_PARAMS", control::SET_PARAMS, CtrlCmd::new(id, 0), params.as_mut_bytes())
    }

    /// Shows the block device, once every tag was fetched; its partitions are looked for before this
    /// returns.
    pub fn start(&self, id: u32, pid: u32) -> Result<(), ControlError> {
        self.command("START_DEV", control::START_DEV, CtrlCmd::new(id, pid.into()), &mut [])
    }

    /// Takes the block device away once its requests are done, and gives all tags back.
    pub fn stop(&self, id: u32) -> Result<(), ControlError> {
        self.command("STOP_DEV", control::STOP_DEV, CtrlCmd::new(id, 0), &mut [])
    }

    /// The same, unless somebody has it open: [`Errno::BUSY`]. Needs [`feature::SAFE_STOP_DEV`].
    pub fn try_stop(&self, id: u32) -> Result<(), ControlError> {
        self.command("TRY_STOP_DEV", control::TRY_STOP_DEV, CtrlCmd::new(id, 0), &mut [])
    }

    /// Removes the device, without waiting for those that have a node of it open. Linux 6.9 has it.
    pub fn delete(&self, id: u32) -> Result<(), ControlError> {
        self.command("DEL_DEV_ASYNC", control::DEL_DEV_ASYNC, CtrlCmd::new(id, 0), &mut [])
    }

    /// The same with waiting.
    pub fn delete_and_wait(&self, id: u32) -> Result<(), ControlError> {
        self.command("DEL_DEV", control::DEL_DEV, CtrlCmd::new(id, 0), &mut [])
    }

    /// Gives it another size. Needs [`feature::UPDATE_SIZE`].
    pub fn set_size(&self, id: u32, sectors: u64) -> Result<(), ControlError> {
        self.command("UPDATE_SIZE", control::UPDATE_SIZE, CtrlCmd::new(id, sectors), &mut [])
    }

    /// A device, whosever it is.
    pub fn info(&self, id: u32) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo::default();
        let header = CtrlCmd::new(id, 0);
        self.command("GET_DEV_INFO", control::GET_DEV_INFO, header, info.as_mut_bytes())?;
        Ok(info)
    }
}

/// Bits that are asked for where the driver has them.
pub const WANTED_FEATURES: u64 = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;

/// Removes a device; lets go of `hold`, which keeps its id from being another's, as late as may be.
pub fn delete<T>(control: &Control<'_>, id: u32, hold: T) -> Result<(), ControlError> {
    let deleted = match control.delete(id) {
        Err(ControlError { errno: Errno::OPNOTSUPP | Errno::INVAL, .. }) => {
            drop(hold);
            control.delete_and_wait(id)
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
