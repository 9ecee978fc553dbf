//! An RBD image as a [`Device`].

use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
    range_end,
};
use freestone_core::sync::mpsc::{self, RecvTimeoutError};
use freestone_core::sync::thread;
use freestone_core::timer;

use crate::config::{Config, ImageName, MAX_TIMEOUT, MIN_TIMEOUT};
use crate::error::SetupError;
use crate::extents::{query_range, rows};
use crate::job::Job;
use crate::shared::{Shared, is_completion_thread};
use crate::worker::{self, ExtentQuery, OpenedImage, TaskQueue};

/// Maximum time that dropping a device waits for the image to close. After that time, the image is
/// closed in the background.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time in addition to the timeout that opening an image may take. librbd has the same timeout and
/// must fail first, because its error is more precise.
const OPEN_GRACE: Duration = Duration::from_secs(2);

/// A Ceph RBD image as a block device.
pub struct Rbd {
    config: Config,
    shared: Arc<Shared>,
    object_size: u64,
    queue: Arc<TaskQueue>,
}

impl Rbd {
    /// Connects to the cluster and opens the image that `config` names.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let timeout = config.timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT);
        let config = Config { timeout, ..config.clone() };
        timer::start().map_err(SetupError::Thread)?;
        let queue = Arc::new(TaskQueue::default());
        let (sender, receiver) = mpsc::sync_channel(1);
        let (own, thread_queue) = (config.clone(), Arc::clone(&queue));
        let run = move || worker::run(&own, &thread_queue, &sender);
        thread::Builder::new().name("rbd".into()).spawn(run).map_err(SetupError::Thread)?;
        match receiver.recv_timeout(timeout + OPEN_GRACE) {
            Ok(ready) => {
                let OpenedImage { shared, object_size } = ready?;
                Ok(Self { config, shared, object_size, queue })
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                queue.stop();
                Err(SetupError::Timeout { image: config.image.to_string(), within: timeout + OPEN_GRACE })
            }
        }
    }

    /// Returns the name of the image.
    pub fn image(&self) -> &ImageName {
        &self.config.image
    }

    /// Returns the name of the snapshot, or `None` if the image itself was opened.
    pub fn snap(&self) -> Option<&str> {
        self.config.snap.as_deref()
    }

    /// Returns the last error of a request, a size check or a query for allocated ranges, or `None`
    /// if none has failed.
    pub fn last_error(&self) -> Option<String> {
        self.shared.last_error()
    }
}

impl Device for Rbd {
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.shared.geometry())?;
        Ok(TryResult::WouldBlock)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.shared.geometry()) {
            return done.complete(Err(error), buffer);
        }
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.shared.submit_next(Job::new(request, done), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.shared.geometry();
        let end = range_end(offset, len, geometry.size)?;
        let image_size = self.shared.image_size();
        let query = query_range(&(offset..end), self.object_size, image_size);
        let whole = |row: &mut dyn FnMut(Extent) -> bool| {
            row(Extent { offset, len, kind: ExtentKind::Data });
            Ok(len)
        };
        if query.is_empty() {
            // The image has shrunk, and the range is beyond its end.
            return whole(row);
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        if !self.queue.push_query(ExtentQuery { range: query.clone(), sender }) {
            return Err(Error::Media);
        }
        match receiver.recv_timeout(self.config.timeout) {
            Ok(Ok(allocated)) => {
                let block = u64::from(geometry.logical_block);
                let known = end.min(query.end.next_multiple_of(block));
                Ok(rows(allocated, offset..known, block, row))
            }
            // If the query fails, the allocation is unknown, and the range is reported as data.
            Ok(Err(errno)) => {
                self.shared.record_error("a query of allocated ranges", errno);
                whole(row)
            }
            Err(RecvTimeoutError::Timeout) => {
                self.shared.record_error("a query of allocated ranges", libc::ETIMEDOUT);
                Err(Error::Media)
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Gone),
        }
    }
}

impl Drop for Rbd {
    fn drop(&mut self) {
        self.shared.stop();
        self.queue.stop();
        // A completion may drop the last reference to the device on a thread that librbd needs to
        // close the image. Such a thread must not wait.
        if !is_completion_thread() && !self.queue.wait_for_exit(DROP_TIMEOUT) {
            tracing::warn!(
                "{}: the cluster does not respond; the image is closed in the background",
                self.config.name
            );
        }
    }
}

impl std::fmt::Debug for Rbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rbd({})", self.config.image)
    }
}
