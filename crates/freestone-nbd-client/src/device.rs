//! The device.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
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
use crate::error::{LinkError, SetupError};
use crate::job::Job;
use crate::lane::{Lane, Remote};
use crate::shared::Shared;
use crate::status::{MAX_ASKED_BYTES, rows};
use crate::tls::TlsSettings;
use crate::uri::Uri;
use crate::wake::Wake;

/// How long the end of a device waits for its threads. One that looks up the name of a host ends when
/// that is done.
const END_MAX: std::time::Duration = std::time::Duration::from_secs(2);

/// An export of an NBD server.
pub struct Nbd {
    shared: Arc<Shared>,
    remote: Arc<Remote>,
    threads: Vec<JoinHandle<()>>,
}

impl Nbd {
    /// Connects to a server. Further connections are made afterwards.
    ///
    /// # Errors
    /// See [`SetupError`].
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let timeout = config.timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT);
        let config = Config { timeout, ..config.clone() };
        let tls = config.uri.tls.then(|| TlsSettings::load(&config.uri, &config.tls)).transpose()?;
        let remote = Arc::new(Remote { config, tls, log: LogLimit::default() });
        let config = &remote.config;
        let link = |source| SetupError::Link { uri: config.uri.to_string(), source };
        let wake = Wake::new().map_err(SetupError::Thread)?;
        let (first, facts) = remote.connect(&wake).map_err(link)?;
        let several =
            facts.flags.intersects(TransmissionFlags::CAN_MULTI_CONN | TransmissionFlags::READ_ONLY);
        let connections = if several { config.connections.clamp(1, MAX_CONNECTIONS) } else { 1 };
        let mut wakes = vec![wake];
        for _ in 1..connections {
            wakes.push(Wake::new().map_err(SetupError::Thread)?);
        }
        timer::start().map_err(SetupError::Thread)?;
        let geometry = facts.geometry(config.read_only);
        let shared = Arc::new(Shared::new(facts, geometry, wakes, config.timeout));
        let mut device = Self { shared, remote: Arc::clone(&remote), threads: Vec::new() };
        let mut first = Some((first, facts));
        for number in 0..connections {
            let lane = Lane::new(number, Arc::clone(&device.shared), Arc::clone(&remote));
            let (shared, first) = (Arc::clone(&device.shared), first.take());
            shared.enter_thread();
            let run = move || {
                // However it ends.
                struct Ends(Arc<Shared>);
                impl Drop for Ends {
                    fn drop(&mut self) {
                        self.0.leave_thread();
                    }
                }
                let _ends = Ends(shared);
                lane.run(first);
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

    /// What was opened.
    pub fn uri(&self) -> &Uri {
        &self.remote.config.uri
    }

    /// Connections that are open now.
    pub fn connections(&self) -> usize {
        self.shared.members()
    }

    /// How often the server was connected to again after all connections were lost.
    pub fn reconnects(&self) -> u64 {
        self.shared.reconnects()
    }

    /// Why a connection was last lost, or could not be made.
    pub fn last_error(&self) -> Option<String> {
        self.shared.last_error()
    }
}

impl Device for Nbd {
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
        // Pieces of this memory are sent and received: a caller's mistake must not reach beyond it.
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.shared.submit(Box::new(Job::new(request, buffer, done)));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.shared.geometry();
        range_end(offset, len, geometry.size)?;
        let facts = self.shared.facts();
        if facts.context.is_none() || offset >= facts.size {
            row(Extent { offset, len, kind: ExtentKind::Data });
            return Ok(len);
        }
        // The server is asked about whole blocks, as far as the export goes.
        let block = u64::from(geometry.logical_block);
        let from = offset - offset % block;
        let end = (offset + len).next_multiple_of(block).min(facts.size);
        let asked = (end - from).min(MAX_ASKED_BYTES);
        let (tell, told) = mpsc::sync_channel(1);
        let done = Box::new(move |outcome| {
            // Who asked waits below.
            let _ = tell.send(outcome);
        });
        self.shared.submit(Box::new(Job::status(from, asked, done)));
        plug::flush();
        let all = told.recv().unwrap_or(Err(Error::Gone))?;
        if all.is_empty() {
            // A server that was connected to meanwhile, without the context.
            row(Extent { offset, len, kind: ExtentKind::Data });
            return Ok(len);
        }
        let mut described = 0;
        rows(&all, from, asked, block, &mut |extent| {
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
        // The last reference may be dropped by a completion, on one of these threads.
        let others = usize::from(self.threads.iter().any(|thread| thread.thread().id() == own));
        if self.shared.stop(END_MAX, others) {
            for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
                let _ = thread.join();
            }
        } else {
            let why = LinkError::Ending;
            tracing::warn!("{}: a connection's thread does not end yet: {why}", self.remote.config.name);
        }
    }
}

impl std::fmt::Debug for Nbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nbd({})", self.remote.config.uri)
    }
}
