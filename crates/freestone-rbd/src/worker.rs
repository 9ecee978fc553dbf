//! The one thread of an image: it opens and closes it, and makes the calls of the library that wait for
//! the cluster. All that wait for this thread have a deadline; it has none itself, and ends when the
//! library lets it.
//!
//! Lock order: `desk` is innermost; nothing is called under it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use freestone_core::device::Geometry;
use freestone_core::sync::mpsc::SyncSender;
use freestone_core::sync::{Condvar, Instant, Mutex};

use crate::config::Config;
use crate::error::{Errno, SetupError};
use crate::librbd::{Cluster, Image, Info, Librbd, Pool};
use crate::shared::Shared;

/// Questions that wait at once.
const MAX_QUESTIONS: usize = 64;
/// Block of a device in bytes: the library takes any byte.
const BLOCK_BYTES: u32 = 512;
/// What an OSD writes at least, in bytes.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;
/// Longest preferred request in bytes: an object, unless these are large.
const MAX_PREFERRED_BYTES: u64 = 4 << 20;
/// Smallest range that a discard frees where the configuration does not say, in bytes: Ceph's default.
const DEFAULT_DISCARD_BYTES: u32 = 64 << 10;
/// Largest size of an image in bytes: what a signed offset reaches, and a block less, so that it can be
/// rounded up.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64 - BLOCK_BYTES as u64;

/// Which ranges of it are allocated, and who hears of that.
pub struct Question {
    pub range: Range<u64>,
    pub tell: SyncSender<Result<Vec<Range<u64>>, Errno>>,
}

/// What the thread is asked to do.
#[derive(Default)]
pub struct Desk {
    desk: Mutex<Asked>,
    changed: Condvar,
}

#[derive(Default)]
struct Asked {
    questions: VecDeque<Question>,
    /// The image may have another size.
    resized: bool,
    /// To close the image and to end.
    stop: bool,
    /// It has ended.
    ended: bool,
}

enum Task {
    Answer(Question),
    Resize,
    Stop,
}

impl Desk {
    /// Asks. False: too many wait.
    pub fn ask(&self, question: Question) -> bool {
        let mut desk = self.desk.lock();
        if desk.questions.len() >= MAX_QUESTIONS {
            return false;
        }
        desk.questions.push_back(question);
        self.changed.notify_all();
        true
    }

    fn look_at_size(&self) {
        self.desk.lock().resized = true;
        self.changed.notify_all();
    }

    /// Has the thread close the image and end.
    pub fn stop(&self) {
        self.desk.lock().stop = true;
        self.changed.notify_all();
    }

    fn ended(&self) {
        self.desk.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits until the thread has ended. False: it has not, within `most`.
    pub fn wait_for_end(&self, most: Duration) -> bool {
        let end = Instant::now() + most;
        let mut desk = self.desk.lock();
        while !desk.ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            desk = self.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn next(&self) -> Task {
        let mut desk = self.desk.lock();
        loop {
            if desk.stop {
                return Task::Stop;
            }
            if std::mem::take(&mut desk.resized) {
                return Task::Resize;
            }
            if let Some(question) = desk.questions.pop_front() {
                return Task::Answer(question);
            }
            desk = self.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What was opened.
pub struct Ready {
    pub shared: Arc<Shared>,
    pub object_size: u64,
}

/// The thread. It tells what it has opened; if nobody waits for that any more, it closes it again.
pub fn run(config: &Config, desk: &Arc<Desk>, tell: &SyncSender<Result<Ready, SetupError>>) {
    match open(config, desk) {
        Ok((image, info)) => {
            let geometry = geometry(&image, info, config);
            let (name, timeout) = (config.name.clone(), config.timeout);
            let shared = Arc::new(Shared::new(name, Arc::clone(&image), info.size, geometry, timeout));
            let ready = Ready { shared: Arc::clone(&shared), object_size: info.object_size };
            // Before this is told the device is there. What cannot be told is dropped with it.
            if tell.send(Ok(ready)).is_ok() {
                work(&image, &shared, desk);
            }
            shared.stop();
            shared.wait_until_idle();
            // The last one.
            drop(image);
        }
        Err(error) => {
            // Who has waited for too long does not hear of it.
            let _ = tell.send(Err(error));
        }
    }
    desk.ended();
}

fn work(image: &Arc<Image>, shared: &Shared, desk: &Desk) {
    loop {
        match desk.next() {
            Task::Stop => return,
            Task::Resize => match image.info() {
                Ok(info) => shared.resized(info.size),
                Err(errno) => shared.note("the size of the image", errno),
            },
            Task::Answer(Question { range, tell }) => {
                // Who has waited for too long does not hear of it.
                let _ = tell.send(image.allocated(range));
            }
        }
    }
}

fn open(config: &Config, desk: &Arc<Desk>) -> Result<(Arc<Image>, Info), SetupError> {
    let library = Librbd::load(config.libraries.as_deref())?;
    let setting = |what| move |errno| SetupError::Setting { what, errno };
    let cluster = Cluster::new(library, config.user.as_deref()).map_err(setting("id"))?;
    let path = config.conf.clone();
    cluster.read_conf(config.conf.as_deref()).map_err(|errno| SetupError::Conf { path, errno })?;
    // Whole seconds.
    let seconds = (config.timeout.as_secs() + u64::from(config.timeout.subsec_nanos() > 0)).to_string();
    for name in [c"client_mount_timeout", c"rados_mon_op_timeout", c"rados_osd_op_timeout"] {
        cluster.set(name, &seconds).map_err(setting("timeout"))?;
    }
    // With its cache the library answers writes before they are carried out. One that fails then is told
    // by the next flush only if that comes before it has failed: a later flush succeeds.
    cluster.set(c"rbd_cache", "false").map_err(setting("rbd_cache"))?;
    // Requests are begun on threads of the library, so that who submits them does not wait. It is the
    // default, and a version without it does so as well.
    let _ = cluster.set(c"rbd_non_blocking_aio", "true");
    cluster.connect().map_err(|errno| SetupError::Connect { errno })?;
    let of_pool = |errno| SetupError::Pool { pool: config.image.pool.clone(), errno };
    let pool = Pool::new(cluster, &config.image.pool, &config.image.namespace).map_err(of_pool)?;
    let (image, what) = match &config.snap {
        Some(snap) => (format!("{}@{snap}", config.image), "image, or no such snapshot of it"),
        None => (config.image.to_string(), "image"),
    };
    let read_only = config.read_only || config.snap.is_some();
    let of_image = |errno| SetupError::Image { image: image.clone(), what, errno };
    let mut opened =
        Image::open(pool, &config.image.name, config.snap.as_deref(), read_only).map_err(of_image)?;
    let watcher = Arc::downgrade(desk);
    let notify = move || {
        if let Some(desk) = watcher.upgrade() {
            desk.look_at_size();
        }
    };
    opened.watch(Box::new(notify)).map_err(of_image)?;
    let info = opened.info().map_err(of_image)?;
    let unfit = |why| Err(SetupError::Unfit { image: image.clone(), why });
    if !read_only && opened.option(c"rbd_cache").map_err(of_image)?.is_some_and(|value| value != "false") {
        return unfit(
            "the configuration of the image or of its pool turns rbd_cache on, with which writes that failed could be lost (rbd config image set POOL/NAME rbd_cache false)",
        );
    }
    match info.size {
        0 => unfit("it is empty (0 bytes)"),
        MAX_SIZE_BYTES.. => unfit("it has 2^63 bytes or more"),
        _ => Ok((Arc::new(opened), info)),
    }
}

fn geometry(image: &Image, info: Info, config: &Config) -> Geometry {
    let size = info.size.next_multiple_of(u64::from(BLOCK_BYTES));
    let preferred = info.object_size.clamp(u64::from(PHYSICAL_BLOCK_BYTES), MAX_PREFERRED_BYTES) as u32;
    let discard = image.cluster().option(c"rbd_discard_granularity_bytes");
    let discard = discard.and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_DISCARD_BYTES);
    Geometry {
        size,
        padding: (size - info.size) as u32,
        logical_block: BLOCK_BYTES,
        physical_block: PHYSICAL_BLOCK_BYTES,
        io_min: PHYSICAL_BLOCK_BYTES,
        io_opt: preferred,
        max_request: 0,
        discard_granularity: discard.max(BLOCK_BYTES),
        fast_zeroes: true,
        // It may write to a log of its own, on this machine (rbd_persistent_cache_mode).
        volatile_cache: true,
        volatile_media: false,
        rotational: false,
        read_only: config.read_only || config.snap.is_some(),
        zones: None,
    }
}
