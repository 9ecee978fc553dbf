//! The device.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
    range_end,
};
use freestone_core::sync::mpsc::{self, RecvTimeoutError};
use freestone_core::sync::thread;
use freestone_core::timer;

use crate::config::{Config, ImageName, MAX_TIMEOUT, MIN_TIMEOUT};
use crate::error::SetupError;
use crate::extents::{asked, rows};
use crate::job::Job;
use crate::shared::{Shared, answers};
use crate::worker::{self, Desk, Question, Ready};

/// How long the end of a device waits for the image to be closed. It goes on after that.
const END_MAX: Duration = Duration::from_secs(5);
/// How much longer than the library is waited for when an image is opened: it knows better what is
/// wrong.
const OPEN_GRACE: Duration = Duration::from_secs(2);

/// An image in RBD.
pub struct Rbd {
    config: Config,
    shared: Arc<Shared>,
    object_size: u64,
    desk: Arc<Desk>,
}

impl Rbd {
    /// Connects to the cluster, and opens an image.
    ///
    /// # Errors
    /// See [`SetupError`].
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let timeout = config.timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT);
        let config = Config { timeout, ..config.clone() };
        timer::start().map_err(SetupError::Thread)?;
        let desk = Arc::new(Desk::default());
        let (tell, told) = mpsc::sync_channel(1);
        let (own, asked) = (config.clone(), Arc::clone(&desk));
        let run = move || worker::run(&own, &asked, &tell);
        thread::Builder::new().name("rbd".into()).spawn(run).map_err(SetupError::Thread)?;
        match told.recv_timeout(timeout + OPEN_GRACE) {
            Ok(ready) => {
                let Ready { shared, object_size } = ready?;
                Ok(Self { config, shared, object_size, desk })
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                desk.stop();
                Err(SetupError::Silent { image: config.image.to_string(), within: timeout + OPEN_GRACE })
            }
        }
    }

    /// What was opened.
    pub fn image(&self) -> &ImageName {
        &self.config.image
    }

    /// The snapshot of it, where it is one.
    pub fn snap(&self) -> Option<&str> {
        self.config.snap.as_deref()
    }

    /// What last went wrong with a request, or when it was looked for the size.
    pub fn last_error(&self) -> Option<String> {
        self.shared.last_error()
    }
}

impl Device for Rbd {
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<Tried> {
        request.check(&self.shared.geometry())?;
        Ok(Tried::WouldBlock)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.shared.geometry()) {
            return done.complete(Err(error), buffer);
        }
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.shared.go_on(Job::new(request, done), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.shared.geometry();
        let end = range_end(offset, len, geometry.size)?;
        let image_size = self.shared.image_size();
        let asked = asked(&(offset..end), self.object_size, image_size);
        let whole = |row: &mut dyn FnMut(Extent) -> bool| {
            row(Extent { offset, len, kind: ExtentKind::Data });
            Ok(len)
        };
        if asked.is_empty() {
            // The image became smaller.
            return whole(row);
        }
        let (tell, told) = mpsc::sync_channel(1);
        if !self.desk.ask(Question { range: asked.clone(), tell }) {
            return Err(Error::Media);
        }
        match told.recv_timeout(self.config.timeout) {
            Ok(Ok(allocated)) => {
                let block = u64::from(geometry.logical_block);
                let known = end.min(asked.end.next_multiple_of(block));
                Ok(rows(allocated, offset..known, block, row))
            }
            // What is not known is data.
            Ok(Err(errno)) => {
                self.shared.note("what of the image is allocated", errno);
                whole(row)
            }
            Err(RecvTimeoutError::Timeout) => {
                self.shared.note("what of the image is allocated", libc::ETIMEDOUT);
                Err(Error::Media)
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Gone),
        }
    }
}

impl Drop for Rbd {
    fn drop(&mut self) {
        self.shared.stop();
        self.desk.stop();
        // The last reference may be dropped by a completion, on a thread that the library needs.
        if !answers() && !self.desk.wait_for_end(END_MAX) {
            tracing::warn!(
                "{}: the cluster does not answer, so the image is not closed yet",
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
