//! The NBD client as a [`Device`].

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
    range_end,
};
use freestone_core::log_limit::LogLimit;
use freestone_core::plug;
use freestone_core::sync::{
    mpsc,
    thread::{self, JoinHandle},
};
use freestone_core::timer;
use freestone_nbd_proto::TransmissionFlags;

use crate::config::{Config, MAX_CONNECTIONS, MAX_TIMEOUT, MIN_TIMEOUT};
use crate::connection::{Connection, Connector};
use crate::error::{LinkError, SetupError};
use crate::link::tls::TlsSettings;
use crate::link::wake::Waker;
use crate::requests::job::Job;
use crate::requests::status::{MAX_QUERY_BYTES, rows};
use crate::shared::Shared;
use crate::uri::Uri;

/// Maximum time that dropping a device waits for its threads. A thread in a name lookup cannot be
/// interrupted and ends later.
const DROP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// An export of an NBD server as a device.
pub struct Nbd {
    shared: Arc<Shared>,
    connector: Arc<Connector>,
    threads: Vec<JoinHandle<()>>,
}

impl Nbd {
    /// Connects to a server. Further connections are opened in the background.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let timeout = config.timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT);
        let config = Config { timeout, ..config.clone() };
        let tls = config.uri.tls.then(|| TlsSettings::load(&config.uri, &config.tls)).transpose()?;
        let connector = Arc::new(Connector { config, tls, log: LogLimit::default() });
        let config = &connector.config;
        let link = |source| SetupError::Link { uri: config.uri.to_string(), source };
        let wake = Waker::new().map_err(SetupError::Thread)?;
        let (first, export_info) = connector.connect(&wake).map_err(link)?;
        let several =
            export_info.flags.intersects(TransmissionFlags::CAN_MULTI_CONN | TransmissionFlags::READ_ONLY);
        let connections = if several { config.connections.clamp(1, MAX_CONNECTIONS) } else { 1 };
        let mut wakers = vec![wake];
        for _ in 1..connections {
            wakers.push(Waker::new().map_err(SetupError::Thread)?);
        }
        timer::start().map_err(SetupError::Thread)?;
        let geometry = export_info.geometry(config.read_only);
        let shared = Arc::new(Shared::new(export_info, geometry, wakers, config.timeout));
        let mut device = Self { shared, connector: Arc::clone(&connector), threads: Vec::new() };
        let mut first = Some((first, export_info));
        for number in 0..connections {
            let connection = Connection::new(number, Arc::clone(&device.shared), Arc::clone(&connector));
            let (shared, first) = (Arc::clone(&device.shared), first.take());
            shared.enter_thread();
            let run = move || {
                // The drop also runs if the thread panics.
                struct ThreadGuard(Arc<Shared>);
                impl Drop for ThreadGuard {
                    fn drop(&mut self) {
                        self.0.leave_thread();
                    }
                }
                let _ends = ThreadGuard(shared);
                connection.run(first);
            };
            match thread::Builder::new().name("nbd client".into()).spawn(run) {
                Ok(thread) => device.threads.push(thread),
                Err(error) => {
                    device.shared.leave_thread();
                    return Err(SetupError::Thread(error));
                }
            }
        }
        Ok(device)
    }

    /// Returns the URI of the export.
    pub fn uri(&self) -> &Uri {
        &self.connector.config.uri
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.shared.members()
    }

    /// Returns the number of reconnections after all connections were lost.
    pub fn reconnects(&self) -> u64 {
        self.shared.reconnects()
    }

    /// Returns the reason why a connection was last lost or could not be opened, if that has
    /// happened.
    pub fn last_error(&self) -> Option<String> {
        self.shared.last_error()
    }
}

impl Device for Nbd {
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
        // The length of the request decides which parts of the buffer are sent and received, so it
        // must be that of the buffer.
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.shared.submit(Box::new(Job::new(request, buffer, done)));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.shared.geometry();
        range_end(offset, len, geometry.size)?;
        let export_info = self.shared.export_info();
        if export_info.context.is_none() || offset >= export_info.size {
            row(Extent { offset, len, kind: ExtentKind::Data });
            return Ok(len);
        }
        // The query covers whole blocks up to the end of the export.
        let block = u64::from(geometry.logical_block);
        let from = offset - offset % block;
        let end = (offset + len).next_multiple_of(block).min(export_info.size);
        let query_len = (end - from).min(MAX_QUERY_BYTES);
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Box::new(move |outcome| {
            // Cannot fail: the receiver waits below.
            let _ = sender.send(outcome);
        });
        self.shared.submit(Box::new(Job::status(from, query_len, done)));
        plug::flush();
        let all = receiver.recv().unwrap_or(Err(Error::Gone))?;
        if all.is_empty() {
            // The client reconnected to a server without the context, so that nothing is known
            // about the range.
            row(Extent { offset, len, kind: ExtentKind::Data });
            return Ok(len);
        }
        let mut described = 0;
        rows(&all, from, query_len, block, &mut |extent| {
            let start = extent.offset.max(offset);
            let end = (extent.offset + extent.len).min(offset + len);
            if start >= end {
                return true;
            }
            described = end - offset;
            row(Extent { offset: start, len: end - start, kind: extent.kind })
        });
        Ok(described)
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        let own = thread::current().id();
        // A completion on one of these threads may drop the last reference. A thread cannot join
        // itself.
        let others = usize::from(self.threads.iter().any(|thread| thread.thread().id() == own));
        if self.shared.stop(DROP_TIMEOUT, others) {
            for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
                let _ = thread.join();
            }
        } else {
            let why = LinkError::Stopped;
            tracing::warn!("{}: a connection thread has not ended yet: {why}", self.connector.config.name);
        }
    }
}

impl std::fmt::Debug for Nbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nbd({})", self.connector.config.uri)
    }
}
