//! The worker thread of an image. The thread opens and closes the image, and makes the librbd calls
//! that block on the cluster. Callers wait for the thread with a deadline. The thread itself has no
//! deadline: it ends when its librbd calls have returned.
//!
//! Lock order: the lock of [`TaskQueue`] is innermost; nothing else is called while the lock is
//! held.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::Geometry;
use freestone_core::sync::mpsc::SyncSender;
use freestone_core::sync::{Condvar, Mutex};

use crate::config::Config;
use crate::error::{Errno, SetupError};
use crate::librbd::Librbd;
use crate::librbd::cluster::{Cluster, Pool};
use crate::librbd::image::{Image, Info};
use crate::shared::Shared;

/// Maximum number of queued queries for allocated ranges.
const MAX_QUERIES: usize = 64;
/// Logical block size of a device in bytes. librbd accepts any byte range.
const BLOCK_BYTES: u32 = 512;
/// Physical block size of a device in bytes: the smallest write of an OSD.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;
/// Largest preferred request size in bytes, for images with larger RADOS objects; otherwise the
/// object size is preferred.
const MAX_PREFERRED_BYTES: u64 = 4 << 20;
/// Default discard granularity in bytes, if Ceph does not report `rbd_discard_granularity_bytes`;
/// also Ceph's own default.
const DEFAULT_DISCARD_BYTES: u32 = 64 << 10;
/// Image sizes from this number of bytes on are rejected: the largest signed offset less one block,
/// so that the size can be rounded up to a block.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64 - BLOCK_BYTES as u64;

/// A query for the allocated ranges within `range`, and the channel for the result.
pub struct ExtentQuery {
    pub range: Range<u64>,
    pub sender: SyncSender<Result<Vec<Range<u64>>, Errno>>,
}

#[derive(Default)]
pub struct TaskQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    queries: VecDeque<ExtentQuery>,
    /// The size of the image may have changed and must be read again.
    resized: bool,
    /// The worker thread must close the image and end.
    stop: bool,
    ended: bool,
}

enum Task {
    Query(ExtentQuery),
    Resize,
    Stop,
}

impl TaskQueue {
    /// Queues a query for allocated ranges. Returns false if [`MAX_QUERIES`] are queued already.
    pub fn push_query(&self, query: ExtentQuery) -> bool {
        let mut queue = self.state.lock();
        if queue.queries.len() >= MAX_QUERIES {
            return false;
        }
        queue.queries.push_back(query);
        self.changed.notify_all();
        true
    }

    fn request_size_check(&self) {
        self.state.lock().resized = true;
        self.changed.notify_all();
    }

    /// Asks the worker thread to close the image and end.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    fn set_ended(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits until the worker thread has ended. Returns false if it has not ended within `most`.
    pub fn wait_for_exit(&self, most: Duration) -> bool {
        !self.changed.wait_timeout_while(self.state.lock(), most, |queue| !queue.ended).1
    }

    fn next(&self) -> Task {
        let mut queue = self.state.lock();
        loop {
            if queue.stop {
                return Task::Stop;
            }
            if std::mem::take(&mut queue.resized) {
                return Task::Resize;
            }
            if let Some(query) = queue.queries.pop_front() {
                return Task::Query(query);
            }
            queue = self.changed.wait(queue);
        }
    }
}

pub struct OpenedImage {
    pub shared: Arc<Shared>,
    pub object_size: u64,
}

/// Runs the worker thread. Sends the opened image to `sender`, and closes the image again if the
/// receiver is gone.
pub fn run(config: &Config, queue: &Arc<TaskQueue>, sender: &SyncSender<Result<OpenedImage, SetupError>>) {
    match open(config, queue) {
        Ok((image, info)) => {
            let geometry = geometry(&image, info, config);
            let (name, timeout) = (config.name.clone(), config.timeout);
            let shared = Arc::new(Shared::new(name, Arc::clone(&image), info.size, geometry, timeout));
            let ready = OpenedImage { shared: Arc::clone(&shared), object_size: info.object_size };
            // After this, the device exists. If the receiver is gone, `send` drops `ready` with its
            // error.
            if sender.send(Ok(ready)).is_ok() {
                work(&image, &shared, queue);
            }
            shared.stop();
            shared.wait_until_idle();
            // The last reference to the image closes it on this thread.
            drop(image);
        }
        Err(error) => {
            // The receiver is gone if it has timed out.
            let _ = sender.send(Err(error));
        }
    }
    queue.set_ended();
}

fn work(image: &Arc<Image>, shared: &Shared, queue: &TaskQueue) {
    loop {
        match queue.next() {
            Task::Stop => return,
            Task::Resize => match image.info() {
                Ok(info) => shared.update_size(info.size),
                Err(errno) => shared.record_error("a query of the image's size", errno),
            },
            Task::Query(ExtentQuery { range, sender }) => {
                // The receiver is gone if it has timed out.
                let _ = sender.send(image.allocated(range));
            }
        }
    }
}

fn open(config: &Config, queue: &Arc<TaskQueue>) -> Result<(Arc<Image>, Info), SetupError> {
    let library = Librbd::load(config.libraries.as_deref())?;
    let setting = |what| move |errno| SetupError::Setting { what, errno };
    let cluster = Cluster::new(library, config.user.as_deref()).map_err(setting("id"))?;
    let path = config.conf.clone();
    cluster.read_conf(config.conf.as_deref()).map_err(|errno| SetupError::Conf { path, errno })?;
    // Ceph's timeouts are whole seconds, so the timeout is rounded up.
    let seconds = (config.timeout.as_secs() + u64::from(config.timeout.subsec_nanos() > 0)).to_string();
    for name in [c"client_mount_timeout", c"rados_mon_op_timeout", c"rados_osd_op_timeout"] {
        cluster.set(name, &seconds).map_err(setting("timeout"))?;
    }
    // With its cache on, librbd completes writes before they reach the cluster. If such a write
    // fails in the background, the next flush may still succeed, and the error is lost.
    cluster.set(c"rbd_cache", "false").map_err(setting("rbd_cache"))?;
    // Requests start on librbd's threads, so that submitters do not block. Versions of Ceph without
    // this option behave like this by default, so an error is ignored.
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
    let watcher = Arc::downgrade(queue);
    let notify = move || {
        if let Some(queue) = watcher.upgrade() {
            queue.request_size_check();
        }
    };
    opened.watch(Box::new(notify)).map_err(of_image)?;
    let info = opened.info().map_err(of_image)?;
    let unfit = |why| Err(SetupError::Unsupported { image: image.clone(), why });
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
        // librbd may write to a local persistent cache (`rbd_persistent_cache_mode`).
        volatile_cache: true,
        volatile_media: false,
        rotational: false,
        read_only: config.read_only || config.snap.is_some(),
        ignores_data: false,
        zones: None,
    }
}
