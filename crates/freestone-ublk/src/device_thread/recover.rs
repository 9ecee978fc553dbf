//! Recovers the block device of a server that has ended.
//!
//! The kernel delivers each request again that the former server has not completed. The former server may have
//! executed some of them, even partly, so a request may take effect twice. This is sound for devices whose requests
//! are idempotent:
//!
//! * Reads change nothing. Writes, write zeroes and discards set the same range to the same content again. Appends to
//!   zones are not idempotent, so zoned devices are not recovered.
//! * The former server executes nothing any more: the kernel closes its files after its last thread has ended, and
//!   refuses the recovery before.
//! * The kernel has not reported the repeated requests as done. So their order to one another, and to all requests
//!   that are still in flight, is open, as for any block device. A completed request is never repeated. A client that
//!   wants an order between overlapping writes waits for the first one; file systems and the page cache do so.
//!   Multipath devices repeat requests in the same way after a lost path.
//! * A flush covers the writes that were completed before it was sent. Their content is in the adopted memory, or the
//!   block device is not recovered, so a repeated flush has nothing left to do. Devices that lose unflushed writes
//!   with their server (`power_cut`) are not recovered.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use freestone_core::device::Disk;
use rustix::io::Errno;

use super::{CreatedDevice, DeviceThreadConfig, StartError, node_error, start_queues};
use crate::format::params;
use crate::kernel::abi::{DevInfo, Params, attr, feature, state};
use crate::kernel::control::{Control, ControlError, RECOVERY_FEATURES, Target, delete};
use crate::recovery::{RELEASE_MAX, RELEASE_POLL, RecoveryTag, find_tagged};
use crate::stale_devices::RegisteredDevice;

/// Recovers block device `id`, and returns true. Returns false if there is no such block device any more. A block
/// device that does not fit the disk is removed.
///
/// # Errors
/// As for a new block device. Until the queues are started, the block device then stays for another attempt.
pub fn recover(
    config: &DeviceThreadConfig,
    disk: &Arc<Disk>,
    (tag, id): (RecoveryTag, u32),
    created: &mut CreatedDevice,
    until: Instant,
) -> Result<bool, StartError> {
    let (kernel, control) = (&*config.kernel, Control(&*config.kernel));
    let Some(info) = find_tagged(&control, tag, id)? else { return Ok(false) };
    let target = Target::new(id, info.flags);
    let params = control.params(target)?;
    if let Err(why) = check_fit(&info, &params, disk) {
        tracing::warn!("{}: /dev/ublkb{id} of the former server is removed: {why}", disk.name);
        delete(&control, target, ())?;
        return Ok(false);
    }
    // The node exists as long as the block device. Found now, because an error after the recovery would be an error
    // for the clients.
    let block = kernel.block(id, until).map_err(node_error(format!("ublkb{id}"), target))?;
    let registration = RegisteredDevice::add(id);
    if !start(&control, target)? {
        return Ok(false);
    }
    let char = kernel.open(id, until).map_err(node_error(format!("ublkc{id}"), target))?;
    // The open file keeps the id from being reused.
    if find_tagged(&control, tag, id)?.is_none() {
        return Ok(false);
    }
    // From here on, an error removes the block device: its requests would wait for a server that does not come.
    (created.target, created.registration) = (Some(target), Some(registration));
    created.char = Some(Arc::clone(&char));
    let features = info.flags;
    config.shared.update(|state| (state.own.id, state.own.features) = (Some(id), features));
    start_queues(config, disk, &char, info, created, until)?;
    drop(char);
    if config.shared.lock().ending {
        return Err(StartError::Deadline);
    }
    control.end_recovery(target, std::process::id())?;
    config.shared.update(|state| state.own.block = Some(block));
    // The disk may have grown just before the former server ended.
    let sectors = params::sectors(disk);
    if features & feature::UPDATE_SIZE != 0
        && sectors != params.basic.dev_sectors
        && let Err(error) = control.set_size(target, sectors)
    {
        tracing::warn!("{}: /dev/ublkb{id} keeps its old size: ublk: {error}", disk.name);
    }
    tracing::info!("{}: /dev/ublkb{id} of the former server is served again", disk.name);
    Ok(true)
}

/// Begins the recovery as soon as the kernel has closed the former server's files. Returns false if the block device
/// is gone.
fn start(control: &Control<'_>, target: Target) -> Result<bool, StartError> {
    let end = Instant::now() + RELEASE_MAX;
    loop {
        match control.start_recovery(target) {
            Ok(()) => return Ok(true),
            Err(ControlError { errno: Errno::BUSY, .. }) if Instant::now() < end => {
                thread::sleep(RELEASE_POLL);
            }
            Err(ControlError { errno: Errno::NODEV, .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Fails if the block device of the former server cannot show the disk to the same clients.
fn check_fit(info: &DevInfo, params: &Params, disk: &Disk) -> Result<(), &'static str> {
    let is_waiting = matches!(info.state, state::LIVE | state::QUIESCED);
    if !is_waiting || info.flags & RECOVERY_FEATURES != RECOVERY_FEATURES {
        return Err("the kernel has stopped it");
    }
    if info.flags & feature::USER_COPY != 0 || params::is_zoned(disk) {
        return Err("zoned block devices cannot be recovered");
    }
    if (params.basic.attrs & attr::READ_ONLY != 0) != disk.read_only {
        return Err("one of both is read-only");
    }
    // A disk that grew on a kernel without `UPDATE_SIZE` is larger than its block device.
    if params.basic.dev_sectors > params::sectors(disk) {
        return Err("the device is smaller");
    }
    let wanted = params::for_disk(disk, info.max_io_buf_bytes).basic;
    if wanted.attrs & !params.basic.attrs & attr::VOLATILE_CACHE != 0 {
        return Err("it sends no flushes, which the device needs");
    }
    Ok(())
}
