//! The thread that keeps an export: makes the device, has its queues served, and takes it away
//! again. It alone waits for commands that take as long as the requests of clients.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use freestone_core::answers::Answers;
use freestone_core::budget::Budget;
use freestone_core::device::Disk;
use freestone_core::workers::Workers;
use rustix::io::Errno;
use rustix::process::configure_io_flusher_behavior;
use thiserror::Error;

use crate::abi::{DevInfo, feature};
use crate::control::{Control, ControlError, Target, WANTED_FEATURES, delete, mark};
use crate::kernel::{CharDevice, Kernel};
use crate::ours::Ours;
use crate::params;
use crate::parts::{Parts, granted};
use crate::queue::Queue;
use crate::shared::{Line, Shared};
use crate::zones::{self, UnfitZones};

/// How long making a block device may take.
pub const START_DEADLINE: Duration = Duration::from_secs(30);
/// How long the node of a user's device may take to become his.
const OWN_DEADLINE: Duration = Duration::from_secs(10);

/// A device cannot be shown as a block device.
#[derive(Debug, Error)]
pub enum StartError {
    /// The driver is not there.
    #[error("there is no /dev/ublk-control: load the kernel's driver with `modprobe ublk_drv`")]
    NoDriver,
    /// Only root may.
    #[error(
        "/dev/ublk-control: permission denied: block devices are made by root, and by all users where \
         Freestone's udev rule is installed"
    )]
    Denied,
    /// A device that its user may not open.
    #[error(
        "/dev/{0}: permission denied: Freestone's udev rule, which gives it to its user, is not installed"
    )]
    NotGiven(String),
    /// The driver has enough of them.
    #[error("the kernel's ublk driver allows no more devices: its parameter ublks_max says how many")]
    TooMany,
    /// The control device cannot be opened.
    #[error("/dev/ublk-control: {0}")]
    NoControl(Errno),
    /// The driver lacks what is used.
    #[error("the kernel's ublk driver is too old: Linux 6.5 or later is needed")]
    TooOld,
    /// There are no zones by ublk here.
    #[error("the kernel shows no zones by ublk: Linux 6.6 or later with CONFIG_BLK_DEV_ZONED is needed")]
    NoZones,
    /// Only root may have zones.
    #[error("zoned block devices are made with CAP_SYS_ADMIN: the driver has none for other users")]
    ZonesOfUser,
    /// Zones that the kernel cannot have.
    #[error("{0}")]
    Unfit(#[from] UnfitZones),
    /// The driver refuses.
    #[error("ublk: {0}")]
    Control(#[from] ControlError),
    /// A node of the device does not appear, or cannot be opened.
    #[error("/dev/{node}: {source}")]
    Node {
        /// Its name.
        node: String,
        /// Why not.
        source: io::Error,
    },
    /// A queue cannot be served.
    #[error("a queue of ublk: {0}")]
    Queue(io::Error),
    /// It takes longer than [`START_DEADLINE`].
    #[error("ublk: the block device was not there in time")]
    Deadline,
}

/// What a keeper works with.
pub struct Around {
    /// The driver.
    pub kernel: Arc<dyn Kernel>,
    /// What it shares.
    pub shared: Arc<Shared>,
    /// How long it may take to begin.
    pub deadline: Duration,
    /// Queues that are asked for.
    pub queues: u16,
    /// Requests of each.
    pub depth: u16,
    /// Largest request in bytes.
    pub max_bytes: u32,
    /// Of the process.
    pub budget: Arc<Budget>,
    /// For dear requests.
    pub workers: Workers,
}

/// What there is of a device, to be undone.
#[derive(Default)]
struct Made {
    target: Option<Target>,
    char: Option<Arc<dyn CharDevice>>,
    threads: Vec<JoinHandle<()>>,
    /// Until it is removed.
    ours: Option<Ours>,
}

/// Makes a device, tells of it, and keeps it until it is to end.
pub fn run(around: &Around, disk: Arc<Disk>, tell: &Sender<Result<(), StartError>>) {
    // Memory that this thread needs is not made free by writing to a block device, which may be its
    // own; the threads of queues inherit that.
    let is_flusher = configure_io_flusher_behavior(true).is_ok();
    let mut made = Made::default();
    let begun = begin(around, &disk, &mut made);
    // What is shared is the one that others may replace.
    drop(disk);
    if begun.is_err() {
        undo(around, made);
        let _ = tell.send(begun);
        return;
    }
    if !is_flusher {
        let name = around.shared.name();
        tracing::warn!("{name}: ublk: may hang where memory is short: its threads lack CAP_SYS_RESOURCE");
    }
    // Nobody listens where it took too long: then it is to end already.
    let _ = tell.send(begun);
    let shared = &around.shared;
    let mut state = shared.lock();
    // Somebody else may stop it, and a queue may fail.
    while !state.ending && !state.queues.iter().any(|line| line.closed) {
        state = shared.wait(state);
    }
    drop(state);
    undo(around, made);
}

fn begin(around: &Around, disk: &Arc<Disk>, made: &mut Made) -> Result<(), StartError> {
    let until = Instant::now() + around.deadline;
    let control = Control(&*around.kernel);
    around.kernel.check().map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => StartError::NoDriver,
        Errno::ACCESS | Errno::PERM => StartError::Denied,
        errno => StartError::NoControl(errno),
    })?;
    let features = control.features().map_err(|error| match error.errno {
        Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY => StartError::TooOld,
        Errno::ACCESS | Errno::PERM => StartError::Denied,
        _ => error.into(),
    })?;
    if features & feature::CMD_IOCTL_ENCODE == 0 {
        return Err(StartError::TooOld);
    }
    let needed = if params::is_zoned(disk) { zones::FEATURES } else { 0 };
    if features & needed != needed {
        return Err(StartError::NoZones);
    }
    // The driver refuses its kind of copies to them, and says no more than that.
    if needed != 0 && !around.kernel.is_admin() {
        return Err(StartError::ZonesOfUser);
    }
    let pid = std::process::id();
    let asked = DevInfo {
        nr_hw_queues: around.queues,
        queue_depth: around.depth,
        max_io_buf_bytes: around.max_bytes,
        ublksrv_pid: pid as i32,
        flags: features & WANTED_FEATURES | needed,
        ublksrv_flags: mark(pid),
        ..DevInfo::default()
    };
    let added = Ours::made_by(|| control.add(asked).map(|info| (info.dev_id, info)));
    let (info, ours) = added.map_err(|error: ControlError| match error.errno {
        Errno::PERM => StartError::Denied,
        Errno::ACCESS => StartError::TooMany,
        // What it says where the kernel is built without zones, with the feature or not.
        Errno::INVAL if needed != 0 => StartError::NoZones,
        _ => error.into(),
    })?;
    let id = info.dev_id;
    let target = Target::new(id, info.flags);
    (made.target, made.ours) = (Some(target), Some(ours));
    around.shared.change(|state| (state.id, state.features) = (Some(id), info.flags & features));
    if info.flags & needed != needed {
        return Err(StartError::NoZones);
    }
    let given = || if target.by_path { until.min(Instant::now() + OWN_DEADLINE) } else { until };
    let node = |name: String| {
        move |source: io::Error| match source.kind() {
            io::ErrorKind::PermissionDenied if target.by_path => StartError::NotGiven(name),
            _ => StartError::Node { node: name, source },
        }
    };
    // First of all: what a user may do with his device depends on its node.
    let char = around.kernel.open(id, given()).map_err(node(format!("ublkc{id}")))?;
    made.char = Some(Arc::clone(&char));
    control.set_params(target, &params::of(disk, info.max_io_buf_bytes))?;
    start_queues(around, disk, &char, info, made, until)?;
    drop(char);
    if around.shared.lock().ending {
        return Err(StartError::Deadline);
    }
    // The queues serve already: partitions are looked for before this returns.
    control.start(target, pid)?;
    let block = around.kernel.block(id, given()).map_err(node(format!("ublkb{id}")))?;
    around.shared.change(|state| state.block = Some(block));
    Ok(())
}

/// Starts a thread for each queue, and waits until all their tags are with the kernel.
fn start_queues(
    around: &Around,
    disk: &Arc<Disk>,
    char: &Arc<dyn CharDevice>,
    info: DevInfo,
    made: &mut Made,
    until: Instant,
) -> Result<(), StartError> {
    let (tell, ready): (Sender<io::Result<()>>, Receiver<_>) = channel();
    for index in 0..info.nr_hw_queues {
        let answers = Arc::new(Answers::new().map_err(StartError::Queue)?);
        let parts = Parts {
            index,
            depth: info.queue_depth,
            max_bytes: info.max_io_buf_bytes as usize,
            user_copy: info.flags & feature::USER_COPY != 0,
            shared: Arc::clone(&around.shared),
            share: around.budget.share(&disk.failures, granted(&answers)),
            answers: Arc::clone(&answers),
            workers: around.workers.clone(),
        };
        let line = Line { answers, seen: 0, in_flight: 0, closed: false };
        around.shared.change(|state| state.queues.push(line));
        let (char, disk, tell) = (Arc::clone(char), Arc::clone(disk), tell.clone());
        let thread = std::thread::Builder::new().name(format!("ublk{}q{index}", info.dev_id));
        let started = thread.spawn(move || serve(parts, char, disk, tell));
        match started {
            Ok(thread) => made.threads.push(thread),
            Err(error) => {
                around.shared.change(|state| {
                    state.queues.pop();
                });
                return Err(StartError::Queue(error));
            }
        }
    }
    drop(tell);
    for _ in 0..info.nr_hw_queues {
        match ready.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(ready) => ready.map_err(StartError::Queue)?,
            Err(RecvTimeoutError::Timeout) => return Err(StartError::Deadline),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(StartError::Queue(io::Error::other("its thread has ended")));
            }
        }
    }
    Ok(())
}

/// A queue's thread.
fn serve(parts: Parts, char: Arc<dyn CharDevice>, disk: Arc<Disk>, tell: Sender<io::Result<()>>) {
    let (shared, index) = (Arc::clone(&parts.shared), parts.index);
    let queue = char
        .ring(index, parts.depth, parts.user_copy, parts.answers.wake_fd())
        .and_then(|ring| Queue::new(parts, ring, disk));
    drop(char);
    let close = || shared.change(|state| state.queues[usize::from(index)].closed = true);
    match queue {
        Ok(queue) => {
            let _ = tell.send(Ok(()));
            drop(tell);
            // A panic of a device's must not leave others waiting for this queue.
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| queue.serve()));
            close();
            if let Ok(drained) = served {
                drained.drain();
            }
        }
        Err(error) => {
            close();
            let _ = tell.send(Err(error));
        }
    }
}

/// Takes away what there is of a device, once its requests are done.
fn undo(around: &Around, made: Made) {
    let (shared, control) = (&around.shared, Control(&*around.kernel));
    let Made { target, char, threads, ours } = made;
    shared.change(|state| state.ending = true);
    if let Some(target) = target {
        // Also gives back the tags of a device that was not started.
        let stopped = control.stop(target);
        if let Err(error) = stopped
            && error.errno != Errno::NODEV
        {
            tracing::warn!("{}: ublk: {error}", shared.name());
        }
        if stopped.is_err() {
            for line in &shared.lock().queues {
                line.answers.end();
            }
        }
        let mut state = shared.lock();
        while !state.queues.iter().all(|line| line.closed) {
            state = shared.wait(state);
        }
        state.block = None;
        drop(state);
        if let Err(error) = delete(&control, target, char) {
            tracing::warn!("{}: ublk: {error}", shared.name());
        }
    }
    drop(ours);
    shared.change(|state| state.removed = true);
    for thread in threads {
        let _ = thread.join();
    }
    // It may wait for a disk: not under the lock.
    let disk = shared.change(|state| state.disk.take());
    drop(disk);
    shared.change(|state| state.ended = true);
}
