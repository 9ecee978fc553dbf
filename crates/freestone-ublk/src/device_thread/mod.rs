//! The device thread of an export: creates the block device or recovers that of a former server,
//! starts its queues, and removes the device at the end. Only the device thread waits for control
//! commands that take as long as client requests.

mod recover;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::Disk;
use freestone_core::workers::Workers;
use rustix::io::Errno;
use rustix::process::configure_io_flusher_behavior;
use thiserror::Error;

use crate::format::params;
use crate::format::zones::{self, UnsupportedZones};
use crate::kernel::abi::{DevInfo, feature};
use crate::kernel::control::{
    Control, ControlError, RECOVERY_FEATURES, Target, WANTED_FEATURES, delete, mark,
};
use crate::kernel::{CharDevice, Kernel};
use crate::queue::Queue;
use crate::queue::resources::QueueResources;
use crate::recovery::Recovery;
use crate::shared::{QueueState, Shared};
use crate::stale_devices::RegisteredDevice;

/// Longest time for creating a block device.
pub const START_DEADLINE: Duration = Duration::from_secs(30);
/// Longest wait for udev to give the node of an unprivileged device to its user.
const NODE_OWNER_DEADLINE: Duration = Duration::from_secs(10);

/// An error from exporting a device.
#[derive(Debug, Error)]
pub enum StartError {
    /// The driver is not loaded.
    #[error("there is no /dev/ublk-control: load the kernel's driver with `modprobe ublk_drv`")]
    NoDriver,
    /// The process may not use the driver.
    #[error(
        "/dev/ublk-control: permission denied: block devices are created by root, and by all users where \
         Freestone's udev rule is installed"
    )]
    PermissionDenied,
    /// The process may not open its own device's node.
    #[error(
        "/dev/{0}: permission denied: Freestone's udev rule, which gives it to its user, is not installed"
    )]
    NodeNotOwned(String),
    /// The driver's limit of devices is reached.
    #[error("the kernel's ublk driver allows no more devices: its parameter ublks_max is the limit")]
    DeviceLimit,
    /// The control device cannot be opened.
    #[error("/dev/ublk-control: {0}")]
    ControlDevice(Errno),
    /// The driver lacks a required feature.
    #[error("the kernel's ublk driver is too old: Linux 6.5 or later is needed")]
    DriverTooOld,
    /// The kernel does not support zoned ublk devices.
    #[error("the kernel shows no zones by ublk: Linux 6.6 or later with CONFIG_BLK_DEV_ZONED is needed")]
    NoZones,
    /// The process may not create zoned devices.
    #[error("zoned block devices are created with CAP_SYS_ADMIN: the driver has none for other users")]
    UnprivilegedZones,
    /// The kernel does not support the device's zones.
    #[error("{0}")]
    UnsupportedZones(#[from] UnsupportedZones),
    /// The driver rejected a command.
    #[error("ublk: {0}")]
    Control(#[from] ControlError),
    /// A node of the device does not appear or cannot be opened.
    #[error("/dev/{node}: {source}")]
    Node {
        /// Name of the node.
        node: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// A queue cannot be started.
    #[error("ublk queue: {0}")]
    Queue(io::Error),
    /// The block device was not ready within [`START_DEADLINE`].
    #[error("ublk: the block device was not ready in time")]
    Deadline,
}

/// Configuration of a device thread.
pub struct DeviceThreadConfig {
    pub kernel: Arc<dyn Kernel>,
    /// State shared with the export's owner and the queues.
    pub shared: Arc<Shared>,
    pub deadline: Duration,
    /// Number of queues to request from the driver.
    pub queues: u16,
    pub depth: u16,
    /// Largest request in bytes.
    pub max_bytes: u32,
    /// Memory budget of the process for bytes in flight.
    pub budget: Arc<Budget>,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// Set if the block device survives the end of this server.
    pub recovery: Option<Recovery>,
}

/// The parts of a device created so far, for removal.
#[derive(Default)]
struct CreatedDevice {
    target: Option<Target>,
    char: Option<Arc<dyn CharDevice>>,
    threads: Vec<JoinHandle<()>>,
    /// Entry in the list of this process's devices, kept until the device is removed.
    registration: Option<RegisteredDevice>,
}

/// Creates the device, sends the result through `sender`, and removes the device when the export
/// ends.
pub fn run(config: &DeviceThreadConfig, disk: Arc<Disk>, sender: &Sender<Result<(), StartError>>) {
    // With this flag, allocations of this thread do not wait for writes to a block device, which
    // may be this export. The queue threads inherit the flag.
    let is_flusher = configure_io_flusher_behavior(true).is_ok();
    let mut created = CreatedDevice::default();
    let begun = begin(config, &disk, &mut created);
    // The shared state may replace its disk. This reference would keep the replaced disk alive.
    drop(disk);
    if begun.is_err() {
        undo(config, created);
        let _ = sender.send(begun);
        return;
    }
    if !is_flusher {
        let name = config.shared.name();
        tracing::warn!("{name}: ublk: may hang under memory pressure: its threads lack CAP_SYS_RESOURCE");
    }
    // The receiver is gone after a timeout; `ending` is then already set.
    let _ = sender.send(begun);
    let shared = &config.shared;
    let mut state = shared.lock();
    // A queue closes if another process stops the device, or if the queue fails.
    while !state.ending && !state.own.queues.iter().any(|queue| queue.closed) {
        state = shared.wait(state);
    }
    drop(state);
    undo(config, created);
}

fn begin(
    config: &DeviceThreadConfig,
    disk: &Arc<Disk>,
    created: &mut CreatedDevice,
) -> Result<(), StartError> {
    let until = Instant::now() + config.deadline;
    let features = check_driver(config, disk)?;
    if let Some(Recovery { tag, waiting: Some(id) }) = config.recovery
        && recover::recover(config, disk, (tag, id), created, until)?
    {
        return Ok(());
    }
    add(config, disk, features, created, until)
}

/// Checks that the driver supports the disk, and returns its [`feature`] bits.
fn check_driver(config: &DeviceThreadConfig, disk: &Arc<Disk>) -> Result<u64, StartError> {
    config.kernel.check().map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => StartError::NoDriver,
        Errno::ACCESS | Errno::PERM => StartError::PermissionDenied,
        errno => StartError::ControlDevice(errno),
    })?;
    let features = Control(&*config.kernel).features().map_err(|error| match error.errno {
        Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY => StartError::DriverTooOld,
        Errno::ACCESS | Errno::PERM => StartError::PermissionDenied,
        _ => error.into(),
    })?;
    if features & feature::CMD_IOCTL_ENCODE == 0 {
        return Err(StartError::DriverTooOld);
    }
    let needed = needed_features(disk);
    if features & needed != needed {
        return Err(StartError::NoZones);
    }
    // Without this check, the driver would reject user copy for an unprivileged device with an
    // unspecific error.
    if needed != 0 && !config.kernel.is_admin() {
        return Err(StartError::UnprivilegedZones);
    }
    Ok(features)
}

fn needed_features(disk: &Disk) -> u64 {
    if params::is_zoned(disk) { zones::FEATURES } else { 0 }
}

/// Creates the block device.
fn add(
    config: &DeviceThreadConfig,
    disk: &Arc<Disk>,
    features: u64,
    created: &mut CreatedDevice,
    until: Instant,
) -> Result<(), StartError> {
    let (control, needed) = (Control(&*config.kernel), needed_features(disk));
    let recovery = recovery_of(config, disk, features);
    let pid = std::process::id();
    let requested = DevInfo {
        nr_hw_queues: config.queues,
        queue_depth: config.depth,
        max_io_buf_bytes: config.max_bytes,
        ublksrv_pid: pid as i32,
        flags: features & WANTED_FEATURES | needed | recovery.map_or(0, |_| RECOVERY_FEATURES),
        ublksrv_flags: recovery.map_or(mark(pid), |recovery| recovery.tag.flags()),
        ..DevInfo::default()
    };
    let added = RegisteredDevice::create(|| control.add(requested).map(|info| (info.dev_id, info)));
    let (info, registration) = added.map_err(|error: ControlError| match error.errno {
        Errno::PERM => StartError::PermissionDenied,
        Errno::ACCESS => StartError::DeviceLimit,
        // The driver returns EINVAL if the kernel is built without zones, even if the driver
        // reports the feature.
        Errno::INVAL if needed != 0 => StartError::NoZones,
        _ => error.into(),
    })?;
    let id = info.dev_id;
    let target = Target::new(id, info.flags);
    (created.target, created.registration) = (Some(target), Some(registration));
    config.shared.update(|state| (state.own.id, state.own.features) = (Some(id), info.flags & features));
    if info.flags & needed != needed {
        return Err(StartError::NoZones);
    }
    let given = || if target.by_path { until.min(Instant::now() + NODE_OWNER_DEADLINE) } else { until };
    // Opened before other commands: the kernel checks an unprivileged user's permissions on this
    // node.
    let char = config.kernel.open(id, given()).map_err(node_error(format!("ublkc{id}"), target))?;
    created.char = Some(Arc::clone(&char));
    control.set_params(target, &params::for_disk(disk, info.max_io_buf_bytes))?;
    start_queues(config, disk, &char, info, created, until)?;
    drop(char);
    if config.shared.lock().ending {
        return Err(StartError::Deadline);
    }
    // The queues already serve requests: the command scans for partitions before it returns.
    control.start(target, pid)?;
    let block = config.kernel.block(id, given()).map_err(node_error(format!("ublkb{id}"), target))?;
    config.shared.update(|state| state.own.block = Some(block));
    Ok(())
}

/// Returns the error for a node of the device that cannot be opened.
fn node_error(name: String, target: Target) -> impl FnOnce(io::Error) -> StartError {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied if target.by_path => StartError::NodeNotOwned(name),
        _ => StartError::Node { node: name, source },
    }
}

/// Returns the recovery settings, or `None` if the driver does not let this process recover the block
/// device.
fn recovery_of(config: &DeviceThreadConfig, disk: &Disk, features: u64) -> Option<Recovery> {
    let recovery = config.recovery?;
    let why = if params::is_zoned(disk) {
        "it has zones"
    } else if features & RECOVERY_FEATURES != RECOVERY_FEATURES {
        "the kernel's ublk driver is too old"
    } else if !config.kernel.is_admin() {
        "the server lacks CAP_SYS_ADMIN"
    } else {
        return Some(recovery);
    };
    tracing::warn!("{}: its block device ends with the server, even if that is killed: {why}", disk.name);
    None
}

/// Starts a thread for each queue, and waits until all queues have fetched their tags.
fn start_queues(
    config: &DeviceThreadConfig,
    disk: &Arc<Disk>,
    char: &Arc<dyn CharDevice>,
    info: DevInfo,
    created: &mut CreatedDevice,
    until: Instant,
) -> Result<(), StartError> {
    let (sender, ready): (Sender<io::Result<()>>, Receiver<_>) = channel();
    for index in 0..info.nr_hw_queues {
        let answers = Arc::new(CompletionQueue::new().map_err(StartError::Queue)?);
        let resources = QueueResources {
            index,
            depth: info.queue_depth,
            max_bytes: info.max_io_buf_bytes as usize,
            user_copy: info.flags & feature::USER_COPY != 0,
            shared: Arc::clone(&config.shared),
            share: config.budget.share(&disk.failures, Arc::clone(&answers) as _),
            answers: Arc::clone(&answers),
            workers: config.workers.clone(),
        };
        let queue = QueueState { answers, applied_version: 0, in_flight: 0, closed: false };
        config.shared.update(|state| state.own.queues.push(queue));
        let (char, disk, sender) = (Arc::clone(char), Arc::clone(disk), sender.clone());
        let thread = std::thread::Builder::new().name(format!("ublk{}q{index}", info.dev_id));
        let started = thread.spawn(move || serve(resources, char, disk, sender));
        match started {
            Ok(thread) => created.threads.push(thread),
            Err(error) => {
                config.shared.update(|state| state.own.queues.pop());
                return Err(StartError::Queue(error));
            }
        }
    }
    drop(sender);
    for _ in 0..info.nr_hw_queues {
        match ready.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(ready) => ready.map_err(StartError::Queue)?,
            Err(RecvTimeoutError::Timeout) => return Err(StartError::Deadline),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(StartError::Queue(io::Error::other("the thread has ended")));
            }
        }
    }
    Ok(())
}

/// Creates and runs a queue on its thread. Sends the result of the creation through `sender`.
fn serve(
    resources: QueueResources,
    char: Arc<dyn CharDevice>,
    disk: Arc<Disk>,
    sender: Sender<io::Result<()>>,
) {
    let (shared, index) = (Arc::clone(&resources.shared), resources.index);
    let queue = char
        .ring(index, resources.depth, resources.user_copy, resources.answers.wake_fd())
        .and_then(|ring| Queue::new(resources, ring, disk));
    drop(char);
    let close = || shared.update(|state| state.own.queues[usize::from(index)].closed = true);
    match queue {
        Ok(queue) => {
            let _ = sender.send(Ok(()));
            drop(sender);
            // If a device panics, other threads must not wait for this queue forever.
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| queue.serve()));
            close();
            if let Ok(drained) = served {
                drained.drain();
            }
        }
        Err(error) => {
            close();
            let _ = sender.send(Err(error));
        }
    }
}

/// Stops and removes the device when its requests are done, and releases everything that was
/// created.
fn undo(config: &DeviceThreadConfig, created: CreatedDevice) {
    let (shared, control) = (&config.shared, Control(&*config.kernel));
    let CreatedDevice { target, char, threads, registration } = created;
    shared.update(|state| state.ending = true);
    if let Some(target) = target {
        // STOP_DEV also ends the fetches of a device that was not started.
        let stopped = control.stop(target);
        if let Err(error) = stopped
            && error.errno != Errno::NODEV
        {
            tracing::warn!("{}: ublk: {error}", shared.name());
        }
        if stopped.is_err() {
            for queue in &shared.lock().own.queues {
                queue.answers.shut_down();
            }
        }
        let mut state = shared.lock();
        while !state.own.queues.iter().all(|queue| queue.closed) {
            state = shared.wait(state);
        }
        state.own.block = None;
        drop(state);
        if let Err(error) = delete(&control, target, char) {
            tracing::warn!("{}: ublk: {error}", shared.name());
        }
    }
    drop(registration);
    shared.update(|state| state.own.removed = true);
    for thread in threads {
        let _ = thread.join();
    }
    shared.finish();
}
