//! A device as a block device of this machine.

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

use crate::abi::feature;
use crate::control::{Control, ControlError, Target};
use crate::keeper::{self, Around, START_DEADLINE, StartError};
use crate::kernel::Kernel;
use crate::params;
use crate::shared::Shared;
use crate::system::System;
use crate::within::within;
use crate::zones;

/// How long dropping an export waits for what is in flight.
pub const END_GRACE: Duration = Duration::from_secs(5);
/// How much longer ending one takes at most: what is still in flight is answered with errors.
pub const REMOVE_GRACE: Duration = Duration::from_secs(1);
/// Requests that a queue may have.
pub const MAX_DEPTH: u16 = 128;
/// Queues that an export has at most, each with a thread.
pub const MAX_QUEUES: u16 = 16;
/// Queues where none are asked for: one a CPU, up to so many.
const DEFAULT_QUEUES: usize = 4;
/// Largest data of one request in bytes, a multiple of any page; larger ones come in pieces.
pub const MAX_REQUEST_BYTES: u32 = 512 << 10;
/// How long a question or a small change may take.
const ASK_DEADLINE: Duration = Duration::from_secs(5);

/// How a device is exported.
#[derive(Debug, Clone)]
pub struct Options {
    /// Writes are refused, also where the device takes them.
    pub read_only: bool,
    /// Where requests that fail are counted.
    pub failures: Arc<Failures>,
    /// Bytes that may be held for requests; a request that finds none waits.
    pub budget: Arc<Budget>,
    /// Who does dear requests.
    pub workers: Workers,
    /// Queues, up to [`MAX_QUEUES`] and one a CPU; 0: as many as there are CPUs, up to 4.
    pub queues: u16,
    /// Requests that each may have, 1 to [`MAX_DEPTH`].
    pub depth: u16,
}

impl Options {
    /// As the device is, with the workers of the process.
    pub fn new(budget: Arc<Budget>) -> Self {
        let workers = Workers::process().clone();
        Self { read_only: false, failures: Arc::default(), budget, workers, queues: 0, depth: MAX_DEPTH }
    }
}

/// The block device has a user, who would lose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the block device is in use")]
pub struct InUse;

/// A block device cannot be given the size that its device has now.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// Before Linux 6.16.
    #[error("the kernel's ublk driver cannot change a size: Linux 6.16 or later is needed")]
    Unsupported,
    /// It is ending.
    #[error("the block device is gone")]
    Gone,
    /// The driver refuses.
    #[error("ublk: {0}")]
    Control(#[from] ControlError),
    /// There is no thread for it.
    #[error("ublk: {0}")]
    Thread(#[from] std::io::Error),
    /// The driver does not answer; the size may still change.
    #[error("ublk: the size was not changed in time")]
    Deadline,
}

/// A device at `/dev/ublkbN`, for all programs of this machine that may open it. Dropping it is
/// [`end`](Self::end) with [`END_GRACE`].
pub struct Export {
    path: PathBuf,
    id: u32,
    read_only: bool,
    queues: u16,
    kernel: Arc<dyn Kernel>,
    shared: Arc<Shared>,
}

impl Export {
    /// Exports `device` as `name`; returns when the block device is there.
    ///
    /// # Errors
    /// See [`StartError`]. Nothing of the block device stays.
    pub fn new(name: &str, device: Arc<dyn Device>, options: Options) -> Result<Self, StartError> {
        Self::with(Arc::new(System::default()), START_DEADLINE, name, device, options)
    }

    /// The same with another kernel, and so much time.
    pub(crate) fn with(
        kernel: Arc<dyn Kernel>,
        deadline: Duration,
        name: &str,
        device: Arc<dyn Device>,
        options: Options,
    ) -> Result<Self, StartError> {
        zones::check(&device.geometry())?;
        let Options { read_only, failures, budget, workers, queues, depth } = options;
        let disk = Disk::new(name, read_only, device, failures);
        let read_only = disk.read_only;
        let shared = Arc::new(Shared::new(disk));
        let cpus = || std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(DEFAULT_QUEUES));
        let queues = if queues == 0 { cpus() as u16 } else { queues.min(MAX_QUEUES) };
        let around = Around {
            kernel: Arc::clone(&kernel),
            shared: Arc::clone(&shared),
            deadline,
            queues,
            depth: depth.clamp(1, MAX_DEPTH),
            max_bytes: MAX_REQUEST_BYTES,
            budget,
            workers,
        };
        let (tell, begun) = channel();
        let thread = std::thread::Builder::new().name("ublk".to_owned());
        let disk = shared.lock().disk.clone().expect("it goes when the keeper ends");
        thread.spawn(move || keeper::run(&around, disk, &tell)).map_err(StartError::Queue)?;
        match begun.recv_timeout(deadline) {
            Ok(begun) => begun?,
            Err(RecvTimeoutError::Timeout) => {
                // What the driver waits for is a request, most likely; the keeper does the rest.
                shared.order(|state| (state.ending, state.dead) = (true, true));
                return Err(StartError::Deadline);
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(StartError::Queue(std::io::Error::other("the keeper has ended")));
            }
        }
        let (path, id) = {
            let state = shared.lock();
            (state.path().unwrap_or_default(), state.id.unwrap_or_default())
        };
        tracing::info!(path = %path.display(), "{name}: ublk");
        Ok(Self { path, id, read_only, queues, kernel, shared })
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many queues it was asked for; the kernel has no more than CPUs.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Whether it cannot be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether somebody has the block device, or a part of it, for himself: a file system that is
    /// mounted, swap, a device over it. True where that cannot be told. The question takes it for a
    /// moment, and who wants it for himself just then is refused.
    pub fn is_connected(&self) -> bool {
        let Some(block) = self.shared.lock().block.clone() else { return false };
        let claimed = within(ASK_DEADLINE, "ublk-ask", move || block.is_claimed());
        !matches!(claimed, Ok(Some(Ok(false))))
    }

    /// Begins no request until what it returns is dropped; those in flight go on.
    pub fn hold(&self) -> Held<'_> {
        self.shared.order(|state| state.holds += 1);
        Held(self)
    }

    /// Has the requests that are not begun done by another device, which has the size of this one.
    /// What is cached of the old one stays in the kernel's cache.
    pub fn replace(&self, device: Arc<dyn Device>, failures: Arc<Failures>) {
        let disk = Arc::new(Disk::new(self.name(), self.read_only, device, failures));
        let old = self.shared.order(|state| match &mut state.disk {
            Some(now) => std::mem::replace(now, disk),
            None => disk,
        });
        // It may wait for a disk: not under the lock.
        drop(old);
    }

    /// Gives the block device the size that the device has now.
    ///
    /// # Errors
    /// See [`ResizeError`].
    pub fn resize(&self) -> Result<(), ResizeError> {
        let (disk, features) = {
            let state = self.shared.lock();
            let disk = state.disk.clone().filter(|_| !state.ending);
            (disk.ok_or(ResizeError::Gone)?, state.features)
        };
        if features & feature::UPDATE_SIZE == 0 {
            return Err(ResizeError::Unsupported);
        }
        let (kernel, target) = (Arc::clone(&self.kernel), Target::new(self.id, features));
        let resized = within(ASK_DEADLINE, "ublk-resize", move || {
            Control(&*kernel).set_size(target, params::sectors(&disk))
        });
        Ok(resized?.ok_or(ResizeError::Deadline)??)
    }

    /// Has the block device go once what is in flight is done.
    pub fn begin_to_end(&self) {
        self.shared.change(|state| state.ending = true);
    }

    /// The same, and waits for that. What is not done after `grace` is answered with errors, so that
    /// nobody hangs on it, and then [`REMOVE_GRACE`] may pass. False: the device has not answered
    /// then, or somebody still has a node of it open; it is let go of when that has changed. A second
    /// call finds nothing to do.
    pub fn end(&self, grace: Duration) -> bool {
        let end = Instant::now() + grace;
        self.begin_to_end();
        if self.shared.wait_until(end, |state| state.ended) {
            return true;
        }
        self.shared.order(|state| state.dead = true);
        self.shared.wait_until(end + REMOVE_GRACE, |state| state.removed);
        self.shared.lock().ended
    }

    /// As [`end`](Self::end), unless somebody uses the block device: from Linux 7.0 on whoever has it
    /// open, before that whoever has it for himself.
    ///
    /// # Errors
    /// It is in use, and stays as it is.
    pub fn try_end(&self, grace: Duration) -> Result<bool, InUse> {
        let (is_ending, features) = {
            let state = self.shared.lock();
            (state.ending, state.features)
        };
        if is_ending {
            return Ok(self.end(grace));
        }
        if features & feature::SAFE_STOP_DEV == 0 {
            return if self.is_connected() { Err(InUse) } else { Ok(self.end(grace)) };
        }
        let end = Instant::now() + grace;
        let (kernel, target) = (Arc::clone(&self.kernel), Target::new(self.id, features));
        let stopped = within(grace, "ublk-stop", move || Control(&*kernel).try_stop(target));
        if let Ok(Some(Err(ControlError { errno: Errno::BUSY, .. }))) = stopped {
            return Err(InUse);
        }
        Ok(self.end(end.saturating_duration_since(Instant::now())))
    }
}

/// No request is begun while this lives.
pub struct Held<'a>(&'a Export);

impl Held<'_> {
    /// Whether somebody has the block device for himself.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Answers all that was asked for until now with an error, whatever comes of it: what a loss of
    /// power looks like. Whether there was a block device.
    pub fn cut(&self) -> bool {
        self.0.shared.order(|state| {
            state.cuts += 1;
            !state.ending
        })
    }

    /// Waits until the device has no request. False: it has at `end`.
    pub fn wait_gone(&self, end: Instant) -> bool {
        let shared = &self.0.shared;
        let version = shared.version();
        shared.wait_until(end, |state| state.is_quiet(version))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.shared.order(|state| state.holds -= 1);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if !self.end(END_GRACE) {
            tracing::warn!("{}: ublk: requests are still in flight", self.name());
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name(), self.path.display())
    }
}
