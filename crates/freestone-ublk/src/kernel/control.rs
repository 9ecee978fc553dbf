//! Commands to the control device, one method each.

use std::os::unix::ffi::OsStringExt as _;

use rustix::io::Errno;
use thiserror::Error;
use zerocopy::IntoBytes;

use crate::kernel::Kernel;
use crate::kernel::abi::{CtrlCmd, DevInfo, MAX_ID, Params, control, feature};

/// Marks a device as created by Freestone, in the upper half of `ublksrv_flags`. The lower half
/// holds the process id of the server, because the driver forgets `ublksrv_pid` when the server
/// exits.
const MARK: u64 = 0x4672_6565 << 32;
const MARK_MASK: u64 = 0xffff_ffff << 32;

/// A control command that the driver rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{command}: {errno}")]
pub struct ControlError {
    /// Name of the command in the kernel's header `linux/ublk_cmd.h`.
    pub command: &'static str,
    /// Error that the driver returned.
    pub errno: Errno,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    pub id: u32,
    /// True for unprivileged devices. Commands must then carry the path of the character device,
    /// because the kernel checks the caller's permissions on that node.
    pub by_path: bool,
}

impl Target {
    /// Returns the target for device `id` with these [`feature`] bits.
    pub fn new(id: u32, features: u64) -> Self {
        Self { id, by_path: features & feature::UNPRIVILEGED_DEV != 0 }
    }

    const NONE: Self = Self { id: u32::MAX, by_path: false };
}

/// Sender of control commands. Every method blocks until the command is done.
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

    /// Returns the [`feature`] bits of the driver. Drivers before Linux 6.5 reject the command.
    pub fn features(&self) -> Result<u64, ControlError> {
        let mut features = 0_u64;
        let reply = features.as_mut_bytes();
        self.command("GET_FEATURES", control::GET_FEATURES, Target::NONE, 0, reply)?;
        Ok(features)
    }

    /// Creates a device with a free id. Returns its information: the values of `requested` that the
    /// driver granted.
    pub fn add(&self, requested: DevInfo) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo { dev_id: u32::MAX, ..requested };
        self.command("ADD_DEV", control::ADD_DEV, Target::NONE, 0, info.as_mut_bytes())?;
        Ok(info)
    }

    pub fn set_params(&self, target: Target, params: &Params) -> Result<(), ControlError> {
        let mut params = *params;
        self.command("SET_PARAMS", control::SET_PARAMS, target, 0, params.as_mut_bytes())
    }

    /// Returns the parameters of a device, with its present size.
    pub fn params(&self, target: Target) -> Result<Params, ControlError> {
        // The driver returns as many bytes as `len` says.
        let mut params = Params { len: size_of::<Params>() as u32, ..Params::default() };
        self.command("GET_PARAMS", control::GET_PARAMS, target, 0, params.as_mut_bytes())?;
        Ok(params)
    }

    /// Begins the recovery of a block device without a server. Fails with [`Errno::BUSY`] while a process has the
    /// character device open, and if the device is not [quiesced](crate::kernel::abi::state::QUIESCED).
    pub fn start_recovery(&self, target: Target) -> Result<(), ControlError> {
        self.command("START_USER_RECOVERY", control::START_USER_RECOVERY, target, 0, &mut [])
    }

    /// Ends the recovery. The command waits until every tag has been fetched; the requests that waited then arrive.
    pub fn end_recovery(&self, target: Target, pid: u32) -> Result<(), ControlError> {
        self.command("END_USER_RECOVERY", control::END_USER_RECOVERY, target, pid.into(), &mut [])
    }

    /// Starts the block device. The command waits until every tag has been fetched. It scans for
    /// partitions before it returns, except on unprivileged devices.
    pub fn start(&self, target: Target, pid: u32) -> Result<(), ControlError> {
        self.command("START_DEV", control::START_DEV, target, pid.into(), &mut [])
    }

    /// Stops the block device when its requests are done. The driver then ends the fetches of all
    /// tags.
    pub fn stop(&self, target: Target) -> Result<(), ControlError> {
        self.command("STOP_DEV", control::STOP_DEV, target, 0, &mut [])
    }

    /// Stops the block device unless a process has it open, which fails with [`Errno::BUSY`]. Needs
    /// [`feature::SAFE_STOP_DEV`].
    pub fn try_stop(&self, target: Target) -> Result<(), ControlError> {
        self.command("TRY_STOP_DEV", control::TRY_STOP_DEV, target, 0, &mut [])
    }

    /// Removes the device without waiting for processes that have its nodes open. Needs Linux 6.9.
    pub fn delete(&self, target: Target) -> Result<(), ControlError> {
        self.command("DEL_DEV_ASYNC", control::DEL_DEV_ASYNC, target, 0, &mut [])
    }

    /// Removes the device, and waits until no process has its nodes open.
    pub fn delete_and_wait(&self, target: Target) -> Result<(), ControlError> {
        self.command("DEL_DEV", control::DEL_DEV, target, 0, &mut [])
    }

    /// Sets the size of the device. Needs [`feature::UPDATE_SIZE`].
    pub fn set_size(&self, target: Target, sectors: u64) -> Result<(), ControlError> {
        self.command("UPDATE_SIZE", control::UPDATE_SIZE, target, sectors, &mut [])
    }

    /// Returns information about a device of any owner.
    pub fn info(&self, id: u32) -> Result<DevInfo, ControlError> {
        let mut info = DevInfo::default();
        // GET_DEV_INFO2 accepts a path for every device: the caller does not know yet whether the
        // device is unprivileged.
        let target = Target { id, by_path: true };
        let known = self.command("GET_DEV_INFO2", control::GET_DEV_INFO2, target, 0, info.as_mut_bytes());
        if let Err(ControlError { errno: Errno::NOENT, .. }) = known {
            // Without a node the device belongs to root, or the caller may not query it.
            let target = Target { id, by_path: false };
            self.command("GET_DEV_INFO", control::GET_DEV_INFO, target, 0, info.as_mut_bytes())?;
            return Ok(info);
        }
        known.map(|()| info)
    }
}

/// Features of a block device that survives its server. The driver grants them only to processes with
/// `CAP_SYS_ADMIN`.
pub const RECOVERY_FEATURES: u64 = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;

/// Optional features, requested if the driver supports them.
///
/// The driver does not grant `UNPRIVILEGED_DEV` to a process with `CAP_SYS_ADMIN`. A process
/// without that capability can create no other devices.
pub const WANTED_FEATURES: u64 = feature::UNPRIVILEGED_DEV | feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;

/// Removes a device. `hold` is an open file of the device that keeps its id from being reused, so
/// it is dropped as late as possible.
pub fn delete<T>(control: &Control<'_>, target: Target, hold: T) -> Result<(), ControlError> {
    let deleted = match control.delete(target) {
        Err(ControlError { errno: Errno::OPNOTSUPP | Errno::INVAL, .. }) => {
            drop(hold);
            control.delete_and_wait(target)
        }
        deleted => deleted,
    };
    match deleted {
        Err(ControlError { errno: Errno::NODEV, .. }) => Ok(()),
        deleted => deleted,
    }
}

/// Returns the `ublksrv_flags` of a device created by the Freestone process `pid`.
pub fn mark(pid: u32) -> u64 {
    MARK | u64::from(pid)
}

/// Returns the process id that created a Freestone device, or `None` for devices of other programs.
pub fn creator_pid(info: &DevInfo) -> Option<u32> {
    (info.ublksrv_flags & MARK_MASK == MARK).then_some(info.ublksrv_flags as u32)
}

pub fn is_id(id: u32) -> bool {
    id < MAX_ID
}
