//! The public handle of an exported block device.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::device::{Device, Disk, Failures};
use freestone_core::workers::Workers;
use rustix::io::Errno;
use thiserror::Error;

use crate::device_thread::{self, DeviceThreadConfig, START_DEADLINE, StartError};
use crate::format::params;
use crate::format::zones;
use crate::kernel::abi::feature;
use crate::kernel::control::{Control, ControlError, RECOVERY_FEATURES, Target};
use crate::kernel::deadline::run_with_deadline;
use crate::kernel::system::System;
use crate::kernel::{Kernel, NodeClaim};
use crate::recovery::Recovery;
use crate::shared::{Shared, State};

/// Longest time for which dropping an export waits for requests in flight.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Longest time for which [`Export::shutdown`] continues after its grace period. Requests still in flight
/// then fail with errors.
pub const REMOVE_GRACE: Duration = Duration::from_secs(1);
/// Maximum queue depth.
pub const MAX_DEPTH: u16 = 128;
/// Maximum number of queues of an export. Each queue has a thread.
pub const MAX_QUEUES: u16 = 16;
/// Largest default number of queues; the default is one queue per CPU.
const DEFAULT_QUEUES: usize = 4;
/// Largest data of one request in bytes, a multiple of any page size. The block layer splits larger
/// requests.
pub const MAX_REQUEST_BYTES: u32 = 512 << 10;
/// Longest time for queries and small changes, such as a claim or a resize.
const QUERY_DEADLINE: Duration = Duration::from_secs(5);

/// Options of an export.
#[derive(Debug, Clone)]
pub struct Options {
    /// True if writes are refused even if the device accepts them.
    pub read_only: bool,
    /// Counters of failed requests.
    pub failures: Arc<Failures>,
    /// Memory budget for bytes in flight. A request that exceeds the budget waits.
    pub budget: Arc<Budget>,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// Number of queues, at most [`MAX_QUEUES`]; the kernel reduces it to the number of CPUs. 0 means one per
    /// CPU, at most 4.
    pub queues: u16,
    /// Queue depth, 1 to [`MAX_DEPTH`].
    pub depth: u16,
    /// Set if the block device survives the end of this server, and the next one serves it again. Requests to the
    /// device must be idempotent. Has no effect on zoned devices and without `CAP_SYS_ADMIN`.
    pub recovery: Option<Recovery>,
}

impl Options {
    /// Returns the default options, with the workers of the process.
    pub fn new(budget: Arc<Budget>) -> Self {
        let workers = Workers::process().clone();
        Self {
            read_only: false,
            failures: Arc::default(),
            budget,
            workers,
            queues: 0,
            depth: MAX_DEPTH,
            recovery: None,
        }
    }
}

/// The block device is in use, so ending the export would break its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the block device is in use")]
pub struct InUse;

/// An error from claiming a block device exclusively.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// A mounted file system, swap or another block device uses the device or a partition.
    #[error("{} is {}", .path.display(), in_use(.mount_point.as_deref()))]
    InUse {
        /// Path of the block device.
        path: PathBuf,
        /// Mount point, if it is known.
        mount_point: Option<PathBuf>,
    },
    /// The device cannot be opened, or its cached writes cannot be written back.
    #[error("{}: {source}", .path.display())]
    System {
        /// Path of the block device.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The device does not complete requests, or too slowly.
    #[error("{}: cached writes were not written back within {} s", .0.display(), QUERY_DEADLINE.as_secs())]
    Deadline(PathBuf),
}

fn in_use(mount_point: Option<&Path>) -> String {
    match mount_point {
        Some(at) => format!("mounted at {}", at.display()),
        None => "mounted or in use (by swap, device mapper, RAID, or another program)".to_owned(),
    }
}

/// An error from resizing a block device.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// The driver cannot change the size; it is older than Linux 6.16.
    #[error("the kernel's ublk driver cannot change a size: Linux 6.16 or later is needed")]
    Unsupported,
    /// The export is ending.
    #[error("the block device is gone")]
    Gone,
    /// The driver rejected the resize command.
    #[error("ublk: {0}")]
    Control(#[from] ControlError),
    /// The thread that sends the command cannot be created.
    #[error("ublk: {0}")]
    Thread(#[from] std::io::Error),
    /// The driver did not finish in time. The size may still change.
    #[error("ublk: the size was not changed in time")]
    Deadline,
}

/// A device exported at `/dev/ublkbN`. Dropping the export calls [`shutdown`](Self::shutdown) with
/// [`SHUTDOWN_GRACE`].
pub struct Export {
    path: PathBuf,
    id: u32,
    queues: u16,
    kernel: Arc<dyn Kernel>,
    shared: Arc<Shared>,
}

impl Export {
    /// Exports `device` as `name`, and returns when the block device exists.
    ///
    /// # Errors
    /// See [`StartError`]. On error the block device is removed, except for one that still waits for a server: see
    /// [`Options::recovery`].
    pub fn new(name: &str, device: Arc<dyn Device>, options: Options) -> Result<Self, StartError> {
        Self::with(Arc::new(System::default()), START_DEADLINE, name, device, options)
    }

    /// Exports a device through `kernel`, which tests replace. Fails after `deadline`.
    pub(crate) fn with(
        kernel: Arc<dyn Kernel>,
        deadline: Duration,
        name: &str,
        device: Arc<dyn Device>,
        options: Options,
    ) -> Result<Self, StartError> {
        zones::check(&device.geometry())?;
        let Options { read_only, failures, budget, workers, queues, depth, recovery } = options;
        let disk = Disk::new(name, read_only, device, failures);
        let shared = Arc::new(Shared::new(disk, State::default()));
        let cpus = || std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(DEFAULT_QUEUES));
        let queues = if queues == 0 { cpus() as u16 } else { queues.min(MAX_QUEUES) };
        let config = DeviceThreadConfig {
            kernel: Arc::clone(&kernel),
            shared: Arc::clone(&shared),
            deadline,
            queues,
            depth: depth.clamp(1, MAX_DEPTH),
            max_bytes: MAX_REQUEST_BYTES,
            budget,
            workers,
            recovery,
        };
        let (sender, started) = channel();
        let thread = std::thread::Builder::new().name("ublk".to_owned());
        let disk = shared.lock().disk.clone().expect("the device thread removes the disk at the end");
        thread.spawn(move || device_thread::run(&config, disk, &sender)).map_err(StartError::Queue)?;
        match started.recv_timeout(deadline) {
            Ok(started) => started?,
            Err(RecvTimeoutError::Timeout) => {
                // Most likely the driver waits for a request that the device does not complete. The device
                // thread removes the device when it can.
                shared.update_and_wake(|state| (state.ending, state.own.dead) = (true, true));
                return Err(StartError::Deadline);
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(StartError::Queue(std::io::Error::other("the device thread has ended")));
            }
        }
        let (path, id) = {
            let state = shared.lock();
            (state.own.path().unwrap_or_default(), state.own.id.unwrap_or_default())
        };
        tracing::info!(path = %path.display(), "{name}: ublk");
        Ok(Self { path, id, queues, kernel, shared })
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of queues requested from the kernel, which creates no more queues than CPUs.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Returns the device id, the number `N` in `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns the name of the exported device.
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Returns true if the block device is read-only.
    pub fn is_read_only(&self) -> bool {
        self.shared.is_read_only()
    }

    /// Returns true if the block device or a partition is opened exclusively, for example by a mount, swap or
    /// a stacked device. Also returns true if that cannot be determined. The check claims the device for a
    /// moment; another exclusive open at that moment fails.
    pub fn is_connected(&self) -> bool {
        let Some(block) = self.shared.lock().own.block.clone() else { return false };
        let claimed = run_with_deadline(QUERY_DEADLINE, "ublk-ask", move || block.claim().map(drop));
        !matches!(claimed, Ok(Some(Ok(()))))
    }

    /// Claims the block device exclusively, like a mount, and writes back its cache. The device must complete
    /// requests meanwhile. If the block device is gone, the claim is empty.
    pub fn claim(&self) -> Result<DeviceClaim, ClaimError> {
        let Some(block) = self.shared.lock().own.block.clone() else { return Ok(DeviceClaim(None)) };
        let (path, node) = (self.path.clone(), Arc::clone(&block));
        let claimed = run_with_deadline(QUERY_DEADLINE, "ublk-claim", move || {
            let claimed = node.claim()?;
            if let Some(claimed) = &claimed {
                claimed.sync()?;
            }
            Ok(claimed)
        });
        match claimed.and_then(Option::transpose) {
            Ok(Some(claimed)) => Ok(DeviceClaim(claimed)),
            Ok(None) => Err(ClaimError::Deadline(path)),
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                Err(ClaimError::InUse { path, mount_point: block.mount_point() })
            }
            Err(source) => Err(ClaimError::System { path, source }),
        }
    }

    /// Holds new requests until the returned guard is dropped. Requests in flight continue.
    pub fn hold(&self) -> RequestHold<'_> {
        self.shared.update_and_wake(|state| state.holds += 1);
        RequestHold(self)
    }

    /// Replaces the device for all requests that have not begun. The new device must have the same size. The
    /// kernel still caches content of the old device.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        self.shared.replace(device, failures);
    }

    /// Resizes the block device to the current size of the exported device.
    pub fn resize(&self) -> Result<(), ResizeError> {
        let (disk, features) = {
            let state = self.shared.lock();
            let disk = state.disk.clone().filter(|_| !state.ending);
            (disk.ok_or(ResizeError::Gone)?, state.own.features)
        };
        if features & feature::UPDATE_SIZE == 0 {
            return Err(ResizeError::Unsupported);
        }
        let (kernel, target) = (Arc::clone(&self.kernel), Target::new(self.id, features));
        let resized = run_with_deadline(QUERY_DEADLINE, "ublk-resize", move || {
            Control(&*kernel).set_size(target, params::sectors(&disk))
        });
        Ok(resized?.ok_or(ResizeError::Deadline)??)
    }

    /// Starts to end the export. The block device is removed when the requests in flight are done.
    pub fn begin_shutdown(&self) {
        self.shared.update(|state| state.ending |= !state.own.is_left);
    }

    /// Ends the export and waits until it has ended. After `grace`, requests still in flight fail with
    /// errors, and the removal may take another [`REMOVE_GRACE`].
    ///
    /// Returns false if the device has still not completed its requests, or if a process still has a node
    /// open. The device thread then finishes the removal in the background. Further calls only wait.
    pub fn shutdown(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_shutdown();
        if self.shared.lock().own.is_left {
            return true;
        }
        if self.shared.wait_until(end, |state| state.ended) {
            return true;
        }
        self.shared.update_and_wake(|state| state.own.dead = true);
        self.shared.wait_until(end + REMOVE_GRACE, |state| state.own.removed);
        self.shared.lock().ended
    }

    /// Leaves a recoverable block device to the next process: its requests are served until this process ends, even
    /// after the export was dropped, and then wait in the kernel. Otherwise this is
    /// [`begin_shutdown`](Self::begin_shutdown).
    ///
    /// The rings are not closed before, because the driver of Linux 6.12 may complete a command twice if a ring is closed
    /// while requests arrive. The end of a thread cancels its commands in another way.
    pub fn begin_leave(&self) {
        self.shared.update(|state| {
            let is_recoverable = state.own.features & RECOVERY_FEATURES == RECOVERY_FEATURES;
            state.own.is_left |= is_recoverable && !state.ending;
            state.ending |= !state.own.is_left;
        });
    }

    /// Ends the export like [`shutdown`](Self::shutdown), unless the block device is in use. From Linux 7.0
    /// on, any open file of the block device counts as use; before, only an exclusive open does.
    ///
    /// # Errors
    /// Returns [`InUse`] and leaves the export unchanged.
    pub fn try_shutdown(&self, grace: Duration) -> Result<bool, InUse> {
        let (is_ending, features) = {
            let state = self.shared.lock();
            (state.ending, state.own.features)
        };
        if is_ending {
            return Ok(self.shutdown(grace));
        }
        if features & feature::SAFE_STOP_DEV == 0 {
            return if self.is_connected() { Err(InUse) } else { Ok(self.shutdown(grace)) };
        }
        let end = Instant::now() + grace;
        let (kernel, target) = (Arc::clone(&self.kernel), Target::new(self.id, features));
        let stopped = run_with_deadline(grace, "ublk-stop", move || Control(&*kernel).try_stop(target));
        if let Ok(Some(Err(ControlError { errno: Errno::BUSY, .. }))) = stopped {
            return Err(InUse);
        }
        Ok(self.shutdown(end.saturating_duration_since(Instant::now())))
    }
}

/// An exclusive claim on a block device. The claim is empty if the block device is gone.
pub struct DeviceClaim(Option<Box<dyn NodeClaim>>);

impl DeviceClaim {
    /// Drops the kernel's cache of the block device, and releases the claim. The device must complete
    /// requests meanwhile. An empty claim does nothing.
    ///
    /// # Errors
    /// Returns errors of the kernel, and `TimedOut` if the kernel did not finish in time.
    pub fn drop_cache(mut self) -> std::io::Result<()> {
        let Some(claimed) = self.0.take() else { return Ok(()) };
        let dropped = run_with_deadline(QUERY_DEADLINE, "ublk-drop", move || claimed.drop_cache())?;
        dropped.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for DeviceClaim {
    fn drop(&mut self) {
        // The last close writes back dirty pages and waits for the device, so the drop has a deadline.
        if let Some(claimed) = self.0.take() {
            let _ = run_with_deadline(QUERY_DEADLINE, "ublk-drop", move || drop(claimed));
        }
    }
}

/// A guard that holds new requests of an export until it is dropped.
pub struct RequestHold<'a>(&'a Export);

impl RequestHold<'_> {
    /// Returns true if the block device is opened exclusively.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Fails all requests that have arrived, even those that the device is executing, like a loss of power.
    /// Returns false if the export is ending.
    pub fn fail_requests(&self) -> bool {
        self.0.shared.update_and_wake(|state| {
            state.own.cuts += 1;
            !state.ending
        })
    }

    /// Waits until the device has no requests in flight. Returns false if some are still in flight at `end`.
    pub fn wait_idle(&self, end: Instant) -> bool {
        let shared = &self.0.shared;
        let version = shared.version();
        shared.wait_until(end, |state| state.own.is_idle(version))
    }
}

impl Drop for RequestHold<'_> {
    fn drop(&mut self) {
        self.0.shared.update_and_wake(|state| state.holds -= 1);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if !self.shutdown(SHUTDOWN_GRACE) {
            tracing::warn!("{}: ublk: requests are still in flight", self.name());
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name(), self.path.display())
    }
}
